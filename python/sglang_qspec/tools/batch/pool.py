"""Hands the lines of the input to servers, a bounded number of lines ahead."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from hashlib import blake2b

from sglang_qspec.errors import BatchError
from sglang_qspec.policy import rendezvous
from sglang_qspec.tools.batch.line import Line

LINES_AHEAD = 256
"""Maximum number of lines of a file that were read and that no server has yet."""
BYTES_AHEAD = 32 << 20
"""Maximum size of these lines; one line may be larger."""


class Pool:
    """Lines that no server has yet, and the number of lines that servers have.

    Lines with the same beginning go to the same server, which then finds their common prefix in its
    cache. Rendezvous hashing chooses the server, in proportion to the number of lines that it has
    at once. A server without lines of its own takes lines of others when no more can be read.
    """

    def __init__(self, lines_ahead: int = LINES_AHEAD) -> None:
        """`lines_ahead` is the maximum number of lines that were read and that no server has."""
        self._lines_ahead = lines_ahead
        self._own: dict[str, deque[Line]] = {}
        """Lines by the name of their server; those of a lost server stay until another takes them.
        """
        self._again: deque[Line] = deque()
        """Lines that are asked once more, by any server."""
        self._suspects: deque[Line] = deque()
        """Lines that may end a server. One of them is asked at a time."""
        self._suspect_asked: int | None = None
        """Number of the suspect that a server has."""
        self._depths: dict[str, int] = {}
        """Number of lines that a server has at once, by the names of the servers that take lines.
        """
        self._rooms: dict[str, int] = {}
        """Number of lines that a server may have now, by name; by default that is its depth."""
        self._at: dict[int, str] = {}
        """Names of the servers that have lines, by the number of the line."""
        self._busy = Counter[str]()
        """Number of lines that each server has."""
        self._lines = self._bytes = 0
        self._stalled = True
        """Whether no line can be read now: too many wait, the input blocks or has ended."""
        self._ended = False
        self.error: BatchError | None = None
        """Why reading ended before the end of the input."""
        self._wanted: deque[asyncio.Future[None]] = deque()
        self._room = asyncio.Event()
        self.crowded = asyncio.Event()
        """Set while no line is read, because too many wait for a server."""
        self.done = asyncio.Event()
        """Set when all lines are settled."""

    def join(self, name: str, depth: int) -> None:
        """Let the server take lines, `depth` at once."""
        self._depths[name] = depth
        self._own.setdefault(name, deque())

    def limit(self, name: str, lines: int) -> None:
        """Let the server take no further line while it has this number."""
        self._rooms[name] = lines
        self._wake()

    def leave(self, name: str) -> None:
        """The server takes no lines until it joins again."""
        self._depths.pop(name, None)
        self._wake()

    async def fill(self, lines: AsyncIterator[Line]) -> None:
        """Read lines as long as there is room for them."""
        try:
            while (line := await self._read(lines)) is not None:
                self._park(line)
                while not self._has_room:
                    self._stall()
                    self._room.clear()
                    self.crowded.set()
                    await self._room.wait()
        except BatchError as error:
            self.error = error
        self._ended = True
        self._stall()
        self._check_done()

    async def _read(self, lines: AsyncIterator[Line]) -> Line | None:
        """The next line; meanwhile servers may take each other's lines, if the input blocks."""
        self._stalled = True
        asyncio.get_running_loop().call_soon(self._wake_if_stalled)
        with contextlib.suppress(StopAsyncIteration):
            line = await anext(lines)
            self._stalled = False
            return line
        return None

    @property
    def _has_room(self) -> bool:
        return self._lines < self._lines_ahead and self._bytes < BYTES_AHEAD

    def _park(self, line: Line) -> None:
        self._lines += 1
        self._bytes += len(line.body)
        self._own.setdefault(self._home(line), deque()).append(line)
        self._wake()

    def _home(self, line: Line) -> str:
        """The server that takes lines with this beginning."""
        if not self._depths:
            return ""
        return rendezvous.choose(blake2b(line.prefix, digest_size=32).digest(), self._depths)

    async def take(self, name: str, *, unless_idle: bool = False) -> Line | None:
        """The next line for a server; None if all lines are settled.

        With `unless_idle` it is also None once the input has ended and no line waits.
        """
        while (line := self._pop(name)) is None:
            if self.done.is_set() or (unless_idle and self._ended and not self._lines):
                return None
            wanted = asyncio.get_running_loop().create_future()
            self._wanted.append(wanted)
            await wanted
        self._at[line.number] = name
        self._busy[name] += 1
        return line

    def _pop(self, name: str) -> Line | None:
        if name not in self._depths or self._busy[name] >= self._rooms.get(name, math.inf):
            return None
        if self._again:
            return self._again.popleft()
        if self._suspects and self._suspect_asked is None:
            line = self._suspects.popleft()
            self._suspect_asked = line.number
            return line
        queue = self._own[name]
        if not queue and self._stalled:
            queue = max(self._own.values(), key=len)
        if not queue:
            return None
        line = queue.popleft()
        self._lines -= 1
        self._bytes -= len(line.body)
        if 2 * self._lines < self._lines_ahead and self._has_room:
            self._room.set()
            self.crowded.clear()
        if self._ended and not self._lines:
            self._wake()  # some may take none any more
        return line

    def settle(self, line: Line) -> None:
        """The line that a server had is written."""
        self._give_up(line)
        self._check_done()

    def put_back(self, line: Line, *, suspect: bool = False) -> None:
        """The line that a server had must be asked again; a `suspect` may end servers."""
        self._give_up(line)
        (self._suspects if suspect else self._again).append(line)
        self._wake()

    def _give_up(self, line: Line) -> None:
        self._busy[self._at.pop(line.number)] -= 1
        if self._suspect_asked == line.number:
            self._suspect_asked = None
            self._wake()

    def _check_done(self) -> None:
        if self._ended and not (self._lines or self._at or self._again or self._suspects):
            self.done.set()
            self._wake()

    def _stall(self) -> None:
        self._stalled = True
        self._wake()

    def _wake_if_stalled(self) -> None:
        if self._stalled:
            self._wake()

    def _wake(self) -> None:
        """Let all waiting servers look for a line again."""
        while self._wanted:
            wanted = self._wanted.popleft()
            if not wanted.done():
                wanted.set_result(None)
