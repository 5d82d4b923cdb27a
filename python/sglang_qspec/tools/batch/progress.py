"""Counts what a batch has done, and shows it while it runs."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.server import Reply, ReplyKind

logger = logging.getLogger(__name__)

BAR_S = 0.5
"""Seconds between two states of the bar on a terminal."""
LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""
SHOWN = 20
"""Number of failures that are logged."""


class Progress:
    """Writes settled lines to `results`, and counts them.

    Passes and accepted tokens are those of answers that report them, which servers with QSPEC do.
    """

    def __init__(self, results: Results, *, total: int | None, before: int) -> None:
        """`before` lines of `total` were settled by earlier runs; None means an unknown total."""
        self._results = results
        self._total, self._before = total, before
        self._began = time.monotonic()
        self.answered = self.failed = 0
        self._tokens = self._passes = self._accepted = 0

    def begin(self) -> None:
        """Start the clock, without the time that a server took to start."""
        self._began = time.monotonic()

    def settle(self, line: Line, reply: Reply) -> None:
        """Write and count an answer, or a failed line."""
        self._results.write(line, reply)
        if reply.kind is ReplyKind.ANSWERED:
            self.answered += 1
            self._tokens += reply.tokens
            self._passes += reply.passes
            self._accepted += reply.accepted
            return
        self.failed += 1
        if self.failed <= SHOWN:
            logger.warning("line %d (%s) failed: %s", line.number, line.custom_id, reply.reason)
        if self.failed == SHOWN:
            logger.warning("later failures are only in the file of errors")

    @property
    def settled(self) -> int:
        """Number of lines that this run and earlier ones have settled."""
        return self._before + self.answered + self.failed

    def figures(self) -> str:
        """Tokens, tokens/s, accept length and passes saved, in one line."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        parts = [f"{self._tokens} tokens", f"{self._tokens / seconds:.1f} tokens/s"]
        if self._passes:
            whole = self._passes + self._accepted
            parts.append(f"accept length {whole / self._passes:.2f}")
            parts.append(f"{self._accepted} of {whole} passes saved")
        return ", ".join(parts)

    def summary(self) -> str:
        """The result of the run, for its end."""
        seconds = time.monotonic() - self._began
        earlier = f" ({self._before} more were settled before)" if self._before else ""
        return (
            f"{self.answered} lines answered, {self.failed} failed{earlier} in {seconds:.1f} s: "
            f"{self.figures()}"
        )

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the progress meanwhile: a bar on a terminal, a line every ten seconds elsewhere."""
        show = self._bar if sys.stderr.isatty() else self._log
        with logging_redirect_tqdm():
            task = asyncio.create_task(show())
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _bar(self) -> None:
        with tqdm(total=self._total, initial=self._before, unit="line", file=sys.stderr) as bar:

            def update() -> None:
                bar.set_postfix_str(self.figures(), refresh=False)
                bar.update(self.settled - bar.n)

            try:
                while True:
                    await asyncio.sleep(BAR_S)
                    update()
            finally:
                update()

    async def _log(self) -> None:
        total = "" if self._total is None else f" of {self._total}"
        while True:
            await asyncio.sleep(LINE_S)
            logger.info(
                "%d%s lines, %d failed, %s", self.settled, total, self.failed, self.figures()
            )
