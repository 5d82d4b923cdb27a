"""Asks servers all lines of an input, and settles each line once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Protocol

from sglang_qspec.errors import ClientError, ServerLostError
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.line_guesses import LineGuesses
from sglang_qspec.tools.batch.pool import LINES_AHEAD, Pool
from sglang_qspec.tools.batch.server import LineServer, Reply, ReplyKind

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Number of failures after which a line is given up."""
BUSY_ATTEMPTS = 20
"""Number of times that a server may be too busy for a line before the line counts as failed."""
PAUSE_S = 0.5
"""First pause after a failure; the next ones double."""
LONGEST_PAUSE_S = 30.0
LONGEST_ABSENCE_S = 1.0
"""Longest pause between two attempts to open a server that was lost. An attempt costs one refused
connection, and a server that is back has nothing to do meanwhile."""
GIVE_UP_S = 600.0
"""Time without any server after which the batch ends, in seconds."""


class Sink(Protocol):
    """Takes each line once."""

    def begin(self) -> None:
        """The first servers are open."""

    def settle(self, line: Line, reply: Reply) -> None:
        """The line has an answer, was refused, or was given up."""


class Runner:
    """One run of a batch: lines in, answers out.

    The first servers are opened before the first line is read, and stay. Each other server is
    opened when more lines wait than the pool holds, and closed when no line waits any more.
    """

    def __init__(
        self,
        servers: Sequence[LineServer],
        sink: Sink,
        guesses: LineGuesses | None = None,
        *,
        permanent: int | None = None,
        lines_ahead: int = LINES_AHEAD,
    ) -> None:
        """`permanent` is the number of servers that stay; None means all.

        `lines_ahead` is that of `Pool`.
        """
        self._servers = servers
        self._permanent = servers[:permanent]
        self._sink = sink
        self._guesses = guesses
        self._pool = Pool(lines_ahead)
        self._failures: dict[int, int] = {}
        """Number of failed attempts of unsettled lines, by the number of the line."""
        self._lost: set[str] = set()
        """Names of the servers that are not open."""
        self._said: dict[str, str] = {}
        """Why servers could not be opened, as the log has it, by name."""
        self._alone_since: float | None = None
        """Time since which no server has been open; None while one is."""

    async def run(self, lines: AsyncIterator[Line]) -> None:
        """Settle all lines, and close the servers in any case.

        Raises QSpecError if no server works, or if a server or the input cannot be used.
        """
        try:
            await self._open_all()
            self._sink.begin()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._pool.fill(lines))]
                for server in self._servers:
                    serve = self._serve if server in self._permanent else self._help
                    tasks.append(group.create_task(serve(server)))
                await self._pool.done.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as found:
            raise _first(found) from None
        finally:
            await asyncio.gather(*(server.close() for server in self._servers))
        if self._pool.error is not None:
            raise self._pool.error

    def limit(self, name: str, lines: int) -> None:
        """Ask a server no further line while it has this number."""
        self._pool.limit(name, lines)

    async def _open_all(self) -> None:
        """Open all servers that stay. Raises ServerLostError if none of them answers."""
        self._lost.update(server.name for server in self._servers)
        opening = (server.open() for server in self._permanent)
        found = await asyncio.gather(*opening, return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, ServerLostError):
                raise error
        errors = [error for error in found if error is not None]
        if len(errors) == len(self._permanent):
            raise errors[0]
        for server, error in zip(self._permanent, found, strict=True):
            if error is not None:
                logger.warning("%s; it is left out until it answers", error)
            else:
                self._join(server)  # before the first line is read

    def _join(self, server: LineServer) -> None:
        self._lost.discard(server.name)
        self._alone_since = None
        self._pool.join(server.name, server.depth)

    async def _serve(self, server: LineServer) -> None:
        """Keep a server at its depth until all lines are settled; open it again if it is lost."""
        pause = PAUSE_S
        while not self._pool.done.is_set():
            if server.name not in self._lost:
                pause = PAUSE_S
                await self._work_until_lost(server)
            elif not await self._reopen(server):
                self._check_alone()
                await self._done_within(pause)
                pause = min(2 * pause, LONGEST_ABSENCE_S)

    async def _help(self, server: LineServer) -> None:
        """Open a server whenever too many lines wait, and close it when none waits."""
        while not self._pool.done.is_set():
            await self._pool.crowded.wait()
            if not await self._reopen(server):
                await self._done_within(LONGEST_PAUSE_S)
                continue
            await self._work_until_lost(server, unless_idle=True)
            if server.name not in self._lost:
                logger.info("no line waits any more; %s ends", server.name)
                self._lost.add(server.name)
                await server.close()
                return

    async def _work_until_lost(self, server: LineServer, *, unless_idle: bool = False) -> None:
        """Ask the server as many lines at once as it should have.

        With `unless_idle` it gets no more lines once the input has ended and none waits.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(server.depth):
                    group.create_task(self._work(server, unless_idle))
        except* ServerLostError as lost:
            logger.warning("%s; its lines are asked again", lost.exceptions[0])
        finally:
            self._pool.leave(server.name)

    async def _reopen(self, server: LineServer) -> bool:
        try:
            await server.open()
        except ClientError as error:  # whatever answers in its place, the server may come back
            if self._said.get(server.name) != str(error):
                logger.info("%s; it is tried again", error)
                self._said[server.name] = str(error)
            return False
        self._said.pop(server.name, None)
        logger.info("%s answers", server.name)
        self._join(server)
        return True

    def _check_alone(self) -> None:
        """Raise ClientError if no server has been open for too long."""
        now = time.monotonic()
        if len(self._lost) < len(self._servers):
            return
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > GIVE_UP_S:
            raise ClientError(f"no server has answered for {GIVE_UP_S:g} s")

    async def _done_within(self, seconds: float) -> None:
        """Wait for the end of the batch, at most some seconds."""
        try:
            await asyncio.wait_for(self._pool.done.wait(), seconds)
        except TimeoutError:
            return

    async def _work(self, server: LineServer, unless_idle: bool) -> None:
        """Ask the server one line after another."""
        while line := await self._pool.take(server.name, unless_idle=unless_idle):
            try:
                reply = await self._ask(server, line)
            except ServerLostError as error:
                self._lost.add(server.name)
                self._pool.leave(server.name)
                self._retry(line, Reply(ReplyKind.FAILED, reason=str(error)), suspect=True)
                raise
            except asyncio.CancelledError:
                if server.name in self._lost:
                    reason = f"{server.name} was lost"
                    self._retry(line, Reply(ReplyKind.FAILED, reason=reason), suspect=True)
                raise
            if reply.kind in (ReplyKind.ANSWERED, ReplyKind.REFUSED):
                self._settle(line, reply)
            elif reply.kind is ReplyKind.YIELDED:
                self._pool.put_back(line)
            else:
                self._retry(line, reply)
                await asyncio.sleep(PAUSE_S)

    def _settle(self, line: Line, reply: Reply) -> None:
        self._sink.settle(line, reply)
        if self._guesses is not None:
            self._guesses.settle(line)
        self._failures.pop(line.number, None)
        self._pool.settle(line)

    async def _ask(self, server: LineServer, line: Line) -> Reply:
        """The server's reply to a line; waits while the server is too busy."""
        guesses = [] if self._guesses is None else self._guesses.find(line)
        note = None if self._guesses is None else partial(self._guesses.note, line)
        pause = PAUSE_S
        for _ in range(BUSY_ATTEMPTS):
            reply = await server.ask(line, guesses, note)
            if reply.kind is not ReplyKind.BUSY:
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return reply

    def _retry(self, line: Line, reply: Reply, *, suspect: bool = False) -> None:
        """Let a failed line be asked again, or give it up.

        A line that was at a server twice when it was lost is a suspect. The next time it is asked
        while no other suspect is, so that one line cannot take the others with it.
        """
        failures = self._failures.get(line.number, 0) + 1
        if failures < ATTEMPTS:
            self._failures[line.number] = failures
            self._pool.put_back(line, suspect=suspect and failures == ATTEMPTS - 1)
        else:
            self._settle(line, reply)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group of groups."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
