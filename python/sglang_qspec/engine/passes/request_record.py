"""What the passes keep for a request beside SGLang's own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_qspec.engine.passes.outcome import ComingOutcome

_ATTRIBUTE = "qspec_record"


class VerifiedPrefill(NamedTuple):
    """A prefill that verified drafts, until all of its tokens are in the output."""

    outcome: ComingOutcome
    row: int
    """Index of the request in the batch of the prefill."""
    output_len: int
    """Output length before the prefill, in tokens."""


@dataclass(slots=True)
class RequestRecord:
    """The record of one of SGLang's request objects, which survives a retraction.

    The rid cannot identify it: a client may send the same rid again.
    """

    seed: int | None = None
    """Secret sampling seed; None until a pass samples for a request without `sampling_seed`."""
    unadded: tuple[int, list[int]] | None = None
    """The output length before the last settled pass, and the tokens of the pass; None without the
    overlap scheduler. SGLang has not added the tokens while its output has this length."""
    prefill: VerifiedPrefill | None = None
    """The prefill of the request, while SGLang may not have processed it."""
    unsearched: int = 0
    """Number of tokens at the end of the output that have not been searched for a stop."""


def record_of(req: Any) -> RequestRecord:
    """The record of a request, a new one at the first call."""
    record: RequestRecord | None = getattr(req, _ATTRIBUTE, None)
    if record is None:
        record = RequestRecord()
        setattr(req, _ATTRIBUTE, record)
    return record
