"""The objects of OpenAI's API of files and batches, and its errors.

The fields are those of https://platform.openai.com/docs/api-reference/batch and .../files; times
are Unix times in seconds. Fields that are not OpenAI's are in `qspec`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

import msgspec

from sglang_qspec.errors import QSpecError


class ApiError(QSpecError):
    """A request to the service that is refused, as an HTTP status and an error of OpenAI's API."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """`param` is the field that is wrong, and `code` a word for programs."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class FilePurpose(Enum):
    """What a file is for."""

    INPUT = "batch"
    OUTPUT = "batch_output"


class BatchStatus(Enum):
    """The states of a batch. Those from COMPLETED on are final."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes the batch any more."""
        return self in (
            BatchStatus.COMPLETED,
            BatchStatus.FAILED,
            BatchStatus.EXPIRED,
            BatchStatus.CANCELLED,
        )


class FileObject(msgspec.Struct, kw_only=True, frozen=True):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: FilePurpose
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class RequestCounts(msgspec.Struct, kw_only=True, frozen=True):
    """Numbers of lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Input tokens that needed no prefill."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Output tokens that no answer shows."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class LineError(msgspec.Struct, kw_only=True, frozen=True):
    """Why an input cannot be used; `line` is the number of its line, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Errors(msgspec.Struct, kw_only=True, frozen=True):
    """The list of a batch's errors."""

    data: Sequence[LineError]
    object: Literal["list"] = "list"


class Figures(msgspec.Struct, kw_only=True, frozen=True):
    """What is not in OpenAI's API: the time that a batch needs, and what drafts saved."""

    planned_seconds: float | None = None
    """Seconds from `in_progress_at` to `finalizing_at`, as expected when the batch began; None if
    no speed was known then."""
    estimated_seconds: float | None = None
    """Expected time until the last answer; None before a speed was measured."""
    waits_for: str | None = None
    """Why no line is asked now, such as a full disk."""
    tokens_per_second: float | None = None
    """Output tokens of the batch in a second of the last minutes; None before it was measured, and
    when the batch has ended."""
    passes: int = 0
    """Target passes of the answers since the service started."""
    passes_saved: int = 0
    """Passes that accepted draft tokens saved."""


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """A batch. A change makes a new one, by `msgspec.structs.replace`."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    request_counts: RequestCounts = RequestCounts()
    usage: Usage | None = None
    errors: Errors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    """Seconds after which the files of answers expire; None keeps them."""
    qspec: Figures = Figures()
    object: Literal["batch"] = "batch"


Object = FileObject | Batch


class Named(msgspec.Struct, kw_only=True, frozen=True):
    """What an event is about."""

    id: str


class Event(msgspec.Struct, kw_only=True, frozen=True):
    """A message of a webhook."""

    id: str
    created_at: int
    type: str
    data: Named
    object: Literal["event"] = "event"


def event_of(batch: Batch) -> Event:
    """A new event that says that a batch has ended."""
    return Event(
        id=new_id("evt_"),
        created_at=int(time.time()),
        type=f"batch.{batch.status.value}",
        data=Named(id=batch.id),
    )


def new_id(prefix: str) -> str:
    """A name that nobody can guess: `file-...` or `batch_...`."""
    return prefix + secrets.token_hex(12)


def encoded(value: object) -> bytes:
    """JSON of an object of the API."""
    return msgspec.json.encode(value)


def page(objects: Sequence[Object], *, more: bool) -> dict[str, Any]:
    """A page of a list; `more` says whether further objects follow."""
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0].id if objects else None,
        "last_id": objects[-1].id if objects else None,
        "has_more": more,
    }
