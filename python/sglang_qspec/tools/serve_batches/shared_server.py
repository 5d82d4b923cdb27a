"""A server that has lines of several batches, and requests of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from sglang_qspec.policy.room import Room
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.server import Note, Reply, ReplyKind
from sglang_qspec.tools.guesses.guess import Guess
from sglang_qspec.tools.serve_batches.feed import Feed

LOOK_S = 0.25
"""Seconds between two looks at the load of the server, while batches have lines."""
_OVER = Reply(ReplyKind.REFUSED, reason="the batch is over")
_YIELDED = Reply(ReplyKind.YIELDED, reason="others have requests at the server")


class SharedServer:
    """Drops the lines of jobs that are over, and makes room for the requests of others.

    If the server has more lines than `policy.room` says, it drops the newest ones without a text,
    which wait there or were just begun. The others are finished.
    """

    def __init__(self, server: HttpServer, feed: Feed) -> None:
        self._server, self._feed = server, feed
        self._room = Room()
        self._asked = 0
        """Number of lines that the server has."""
        self._textless: dict[int, asyncio.Event] = {}
        """Events that drop the lines without a text, by the number of the line, the newest last."""

    @property
    def name(self) -> str:
        """As of `LineServer`."""
        return self._server.name

    @property
    def depth(self) -> int:
        """As of `LineServer`."""
        return self._server.depth

    async def open(self) -> None:
        """As of `LineServer`."""
        await self._server.open()

    async def make_room(self, limit: Callable[[str, int], object]) -> None:
        """Give `limit` the name of the server and the number of lines that it may have, for ever.

        A server without lines may have one, so a new batch waits for the first look.
        """
        while True:
            lines = 1
            if self._feed.jobs:
                load = await self._server.load()
                lines = self.depth
                if load is not None:
                    lines = self._room.observe(
                        load.requests, self._asked, lines, load.slots, time.monotonic()
                    )
                newest = [*self._textless.values()][::-1]
                for drop in newest[: max(0, self._asked - lines)]:
                    drop.set()
            limit(self.name, lines)
            await asyncio.sleep(LOOK_S)

    async def ask(self, line: Line, guesses: Sequence[Guess], note: Note | None, /) -> Reply:
        """The reply to a line; that of a job that is over is a refusal, which nobody reads."""
        drop = self._textless[line.number] = asyncio.Event()

        def noted(text: Guess) -> None:
            self._textless.pop(line.number, None)
            if note is not None:
                note(text)

        asking = asyncio.create_task(
            self._server.ask(line, guesses, None if note is None else noted)
        )
        ends = {
            asyncio.create_task(self._feed.over(line).wait()): _OVER,
            asyncio.create_task(drop.wait()): _YIELDED,
        }
        self._asked += 1
        try:
            await asyncio.wait((asking, *ends), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            return next(reply for end, reply in ends.items() if end.done())
        finally:
            self._asked -= 1
            for task in (asking, *ends):
                task.cancel()
            await asyncio.gather(asking, *ends, return_exceptions=True)
            self._textless.pop(line.number, None)

    async def close(self) -> None:
        """As of `LineServer`."""
        await self._server.close()
