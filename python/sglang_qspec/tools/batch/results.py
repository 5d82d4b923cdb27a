"""Writes answers and failures as JSONL files in OpenAI's format, and continues such files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch.digests import Digests
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.complete import peers

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
MAX_RECORD_BYTES = 4 * peers.MAX_BYTES
"""Maximum length of a record, with its answer and its custom_id, also where these are escaped."""
_LOSSES = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Errors with which a file system reports late that it has lost records."""
_START = b'{"id":"batch_req_'
"""How a record begins."""


class _Record(msgspec.Struct):
    """The part of a written line that a later run needs; lines of an input lack `response`."""

    custom_id: str
    response: msgspec.Raw


class Results:
    """The output and the file of failed lines. Each line is in one of them, once it is settled.

    Every record is written with one call as soon as it is known, so that a killed process loses
    none that it has reported.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.answered = Digests()
        """The custom_ids of the records in both files when they were opened."""
        self.failed = 0
        """Number of records in the file of failed lines when it was opened."""
        self._output = _File(output)
        self._errors = _File(errors)

    @classmethod
    def open(cls, output: Path, errors: Path, *, resume: bool) -> Self:
        """Open the files, and with `resume` read and keep their records.

        Raises BatchError if a file cannot be used: another process writes it, it has a line that is
        no record, or it has records without `resume`.
        """
        results = cls(output, errors)
        try:
            results._output.open(resume=resume, into=results.answered)
            answered = len(results.answered)
            results._errors.open(resume=resume, into=results.answered)
            results.failed = len(results.answered) - answered
        except BaseException:
            results.close()
            raise
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, line: Line, reply: Reply) -> None:
        """Write the answer to a line, or the last reply to a line that failed."""
        file = self._output if reply.kind is ReplyKind.ANSWERED else self._errors
        file.append(_record(line, reply))

    def close(self) -> None:
        """Write both files to the disk and close them; remove a file without a record."""
        try:
            self._errors.close(keep=False)
        finally:
            self._output.close()  # the last one, as its lock keeps other runs from both files


def _record(line: Line, reply: Reply) -> bytes:
    response: dict[str, Any] | None = None
    if reply.status is not None:
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": msgspec.Raw(reply.body),
        }
    error = {"code": reply.code, "message": reply.reason}
    record = {
        "id": f"batch_req_{line.number}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error if reply.reason and reply.kind is not ReplyKind.REFUSED else None,
    }
    return msgspec.json.encode(record) + b"\n"


class _File:
    """One JSONL file to which records are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, *, resume: bool, into: Digests) -> None:
        """Lock the file, read the custom_ids of its records, and cut a torn last line."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BatchError(f"{self._path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # `close` could remove the file of the other process
            raise BatchError(f"another process writes {self._path}") from None
        except OSError as error:  # not every file system can
            logger.warning(
                "%s cannot be locked (%s); start no other batch that writes it",
                *(self._path, error.strerror),
            )
        self._descriptor = descriptor
        found = os.fstat(self._descriptor)
        if resume and not stat.S_ISREG(found.st_mode):
            raise BatchError(f"{self._path} is no file, so --resume cannot read its records")
        if found.st_size == 0:
            return
        if not resume:
            raise BatchError(
                f"{self._path} exists; --resume asks the lines that it lacks, or remove it first"
            )
        os.truncate(self._descriptor, self._read(into))

    def _read(self, into: Digests) -> int:
        """Add the custom_ids of all records; returns the length of the file without a torn line.

        A process that was killed leaves at most one torn line, and a machine without power may
        leave other bytes in its place.
        """
        whole = 0
        text = b""
        torn: int | None = None
        with self._path.open("rb", buffering=READ_BYTES) as file:
            lines = iter(lambda: file.readline(MAX_RECORD_BYTES + 1), b"")
            for number, text in enumerate(lines, 1):
                if torn is not None or len(text) > MAX_RECORD_BYTES:
                    self._refuse(torn or number)
                try:
                    record = msgspec.json.decode(text, type=_Record)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    torn = number
                    continue
                if not text.endswith(b"\n"):
                    break
                if not into.add(record.custom_id):
                    raise BatchError(
                        f"{self._path}:{number}: custom_id {record.custom_id!r} has a record before"
                    )
                whole += len(text)
        if torn == 1 and not _START.startswith(text.rstrip(b"\0")[: len(_START)]):
            self._refuse(torn)  # without a record before it, the file may be another one
        return whole

    def _refuse(self, number: int) -> NoReturn:
        raise BatchError(f"{self._path}:{number}: the line is no record of qspec batch")

    def append(self, record: bytes) -> None:
        """Write a record. Raises BatchError if the disk does not take it whole."""
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(record):
                written += os.write(self._descriptor, record[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # other lines may be written before the batch stops
                os.truncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise BatchError(f"{self._path} cannot be written: {error.strerror}") from None

    def close(self, *, keep: bool = True) -> None:
        """Write the file to the disk and close it; without `keep` remove it if it is empty.

        Raises BatchError if the disk did not take all records.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if not keep:
                self._remove_if_empty(descriptor)
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in _LOSSES:  # not every file system can
                raise BatchError(f"{self._path} cannot be written: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def _remove_if_empty(self, descriptor: int) -> None:
        """Remove a file without a record. Links and devices, such as /dev/null, stay."""
        found = os.fstat(descriptor)
        if found.st_size == 0 and stat.S_ISREG(found.st_mode) and not self._path.is_symlink():
            with contextlib.suppress(OSError):  # an empty file does no harm
                self._path.unlink(missing_ok=True)
