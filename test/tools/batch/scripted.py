"""A server of the interface that a script answers for, and a sink that keeps what it gets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from sglang_qspec.errors import ServerLostError
from sglang_qspec.tools.batch.line import Line, parse
from sglang_qspec.tools.batch.server import Note, Reply, ReplyKind
from sglang_qspec.tools.guesses.guess import Guess

ANSWERED = Reply(ReplyKind.ANSWERED, 200, b"{}")


class ScriptedServer:
    """Answers by a function; `lose` breaks its connection until it is opened again."""

    def __init__(
        self,
        name: str = "server",
        depth: int = 4,
        reply: Callable[[Line], Reply] = lambda _line: ANSWERED,
        *,
        seconds: float = 0.0,
    ) -> None:
        self.name, self.depth = name, depth
        self._reply, self._seconds = reply, seconds
        self.asked: list[str] = []
        """The custom_ids of the lines in the order in which they came."""
        self.guesses: dict[str, list[list[str]]] = {}
        """The guesses of each attempt, by custom_id."""
        self.most = self.now = self.opened = 0
        self.refuses_to_open = 0
        """Number of times that `open` fails from now on."""
        self.closed = False
        self._lost: asyncio.Event = asyncio.Event()

    async def open(self) -> None:
        if self.refuses_to_open:
            self.refuses_to_open -= 1
            raise ServerLostError(f"no server answers at {self.name}")
        self.opened += 1
        self._lost = asyncio.Event()

    def lose(self) -> None:
        """Break all connections."""
        self._lost.set()

    async def ask(self, line: Line, guesses: Sequence[Guess], note: Note | None) -> Reply:
        self.asked.append(line.custom_id)
        self.guesses.setdefault(line.custom_id, []).append([guess.text for guess in guesses])
        if note is not None:
            note(Guess(f"text {len(self.guesses[line.custom_id])} of {line.custom_id}", 4))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if not self._lost.is_set():
                reply = self._reply(line)
                await asyncio.sleep(self._seconds)
            if self._lost.is_set():
                raise ServerLostError(f"{self.name}: the connection broke")
            return reply
        finally:
            self.now -= 1

    async def close(self) -> None:
        self.closed = True


class Kept:
    """Keeps the custom_ids of answered and failed lines."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.failed: dict[str, str] = {}
        """Reasons by custom_id."""

    def begin(self) -> None:
        assert not self.answered

    def settle(self, line: Line, reply: Reply) -> None:
        if reply.kind is ReplyKind.ANSWERED:
            self.answered.append(line.custom_id)
        else:
            assert line.custom_id not in self.failed
            self.failed[line.custom_id] = reply.reason

    def assert_once(self, custom_ids: list[str]) -> None:
        """Check that each line was settled once."""
        assert Counter([*self.answered, *self.failed]) == Counter(custom_ids)


class Input:
    """An input of prompts that counts the lines that were read."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[Line]:
        for number, prompt in enumerate(self.prompts, 1):
            self.read += 1
            yield line_of(number, prompt)


def line_of(number: int, prompt: str) -> Line:
    """A line with the prompt as its custom_id."""
    return parse(number, json.dumps({"custom_id": prompt, "prompt": prompt}).encode())
