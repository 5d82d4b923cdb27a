"""One batch that is being served: the lines that it has left, and the records of the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator

from sglang_qspec.errors import BatchError
from sglang_qspec.policy.deadlines import Lengths, Speed
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.lines import Lines
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.serve_batches.objects import BatchStatus, Figures, RequestCounts

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds between two attempts to write a record that the disk has refused."""


class Job:
    """Hands out the lines of a batch, and writes the replies.

    If the disk takes no record, the job hands out no more lines until it does.
    """

    def __init__(
        self, id: str, tenant: str, deadline: float, lines: Lines, results: Results
    ) -> None:
        """`deadline` is a Unix time; `lines` were scanned and are not bad.

        `results` has the records of an earlier service, and the job closes it.
        """
        self.id, self.tenant, self.deadline = id, tenant, deadline
        self.lengths, self.speed = Lengths(), Speed()
        self.passes = self.passes_saved = 0
        self.over = asyncio.Event()
        """Set when all lines have a record, or when the job was stopped."""
        self.stopped_as: BatchStatus | None = None
        """The state for which the job was stopped."""
        self.was_dropped = False
        """Whether the job was stopped without a state for its batch."""
        self.waits_for: str | None = None
        """Why no line is handed out."""
        self._lines, self._results = lines, results
        self._reading: AsyncIterator[Line] | None = None
        self._exhausted = False
        self._asked = 0
        self._counted = 0
        """Output tokens that the speed includes."""
        self._unwritten: deque[tuple[Line, Reply]] = deque()
        self._retry_at = 0.0
        self._failed = results.failed
        self._completed = len(results.answered) - results.failed

    @property
    def counts(self) -> RequestCounts:
        """Numbers of lines, by the records that are written."""
        total = self._lines.total or 0
        return RequestCounts(total=total, completed=self._completed, failed=self._failed)

    def figures(self) -> Figures:
        """The speed of the batch, what drafts saved, and why no line is handed out."""
        return Figures(
            waits_for=self.waits_for,
            tokens_per_second=round(self.speed.rate, 1) or None,
            passes=self.passes,
            passes_saved=self.passes_saved,
        )

    def tick(self, seconds: float) -> None:
        """Measure the speed since the last tick, and write the records that the disk has refused,
        if it takes them now."""
        self.speed.observe(self.lengths.tokens - self._counted, seconds)
        self._counted = self.lengths.tokens
        if self._unwritten and time.monotonic() >= self._retry_at:
            self._write()

    @property
    def left(self) -> int:
        """Number of lines without a record."""
        return (self._lines.total or 0) - self._completed - self._failed

    @property
    def has_lines(self) -> bool:
        """Whether there may be a line to ask now."""
        return not (self._exhausted or self.over.is_set() or self._unwritten)

    async def read(self) -> Line | None:
        """The next line; None if none is left."""
        if self._reading is None:
            self._reading = self._lines.unanswered()
        try:
            async for line in self._reading:
                self._asked += 1
                return line
        except BatchError as error:  # the input cannot be read any more
            logger.error("%s: %s", self.id, error)
            self.waits_for = str(error)
            self.stop(BatchStatus.FAILED)
        self._exhausted = True
        self._check_over()
        return None

    def rewind(self) -> None:
        """Take back all lines that were handed out and have no record."""
        self._reading, self._exhausted, self._asked = None, False, 0

    def settle(self, line: Line, reply: Reply) -> None:
        """Write the reply to a line that was handed out."""
        self._asked -= 1
        self._unwritten.append((line, reply))
        if len(self._unwritten) == 1:
            self._write()

    def _write(self) -> None:
        while self._unwritten and not self.over.is_set():
            line, reply = self._unwritten[0]
            try:
                self._results.write(line, reply)
            except BatchError as error:
                if self.waits_for is None:
                    logger.error("%s waits: %s", self.id, error)
                self.waits_for = str(error)
                self._retry_at = time.monotonic() + RETRY_S
                return
            self._unwritten.popleft()
            self._count(line, reply)
        if self.waits_for is not None and not self.over.is_set():
            logger.info("%s goes on", self.id)
            self.waits_for = None
        self._check_over()

    def _count(self, line: Line, reply: Reply) -> None:
        self._results.answered.add(line.custom_id)
        if reply.kind is ReplyKind.ANSWERED:
            self._completed += 1
            self.lengths.observe(reply.tokens)
            self.passes += reply.passes
            self.passes_saved += reply.accepted
        else:
            self._failed += 1

    def stop(self, status: BatchStatus) -> None:
        """Hand out no more lines, and write no more replies. The batch gets this `status`."""
        if not self.over.is_set():
            self.stopped_as = status
            self.over.set()

    def drop(self) -> None:
        """Hand out no more lines, and write no more replies: another gateway may have the batch."""
        if not self.over.is_set():
            self.was_dropped = True
            self.over.set()

    def _check_over(self) -> None:
        if self._exhausted and not self._asked and not self._unwritten:
            self.over.set()

    async def leave_out(self, code: str, reason: str) -> None:
        """Write a failure with this code and reason for each line without a record.

        Raises BatchError.
        """
        async for line in self._lines.unanswered():
            reply = Reply(ReplyKind.FAILED, reason=reason, code=code)
            self._results.write(line, reply)
            self._count(line, reply)

    def close(self) -> None:
        """Write the records to the disk and close them. Raises BatchError."""
        self._results.close()
