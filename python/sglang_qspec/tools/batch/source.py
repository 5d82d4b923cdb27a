"""Where the lines of an input come from: a file, standard input or a pipe."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from io import FileIO
from typing import Generic, Protocol, TypeVar

from sglang_qspec.errors import BatchError

STANDARD_INPUT = "-"
PARQUET = ".parquet"
"""How the name of a Parquet file, or of a folder of such files, ends."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line, so that an input without line ends cannot fill the memory."""
CHUNK_BYTES = 256 << 10

Numbered = tuple[int, bytes | None]
"""The number of a line, from 1, and its text; None stands for a text that is too long."""
Part = TypeVar("Part")


class Source(Protocol):
    """An input, as numbered lines without the blank ones."""

    @property
    def name(self) -> str:
        """What messages call the input."""

    @property
    def can_be_read_once(self) -> bool:
        """Whether reading uses the input up."""

    def numbered(self) -> Iterator[Numbered]:
        """All lines. Raises BatchError if the input cannot be read."""

    def stream(self) -> AsyncIterator[Numbered]:
        """All lines; the event loop goes on while the input blocks. Raises BatchError."""


def needs_ray(path: str) -> bool:
    """Whether only Ray Data reads the input: a URI, a folder or a Parquet file."""
    return "://" in path or os.path.isdir(path) or path.endswith(PARQUET)


class FileSource:
    """A file, a pipe, or standard input."""

    def __init__(self, path: str) -> None:
        """`path` is the path of the input, or `-`."""
        self.name = path

    @property
    def can_be_read_once(self) -> bool:
        """Whether the input is standard input or a pipe."""
        is_pipe = os.path.exists(self.name) and not os.path.isfile(self.name)
        return self.name == STANDARD_INPUT or is_pipe

    def numbered(self) -> Iterator[Numbered]:
        """All lines. Raises BatchError if the input cannot be read."""
        splitter = _Splitter()
        for chunk in self._chunks():
            yield from splitter.feed(chunk)
        yield from splitter.feed(b"")

    async def stream(self) -> AsyncIterator[Numbered]:
        """All lines. A thread reads, because standard input may block. Raises BatchError."""
        splitter = _Splitter()
        async for chunk in streamed(self._chunks):
            for numbered in splitter.feed(chunk):
                yield numbered
        for numbered in splitter.feed(b""):
            yield numbered

    def _chunks(self) -> Iterator[bytes]:
        try:
            with self._open() as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise BatchError(f"the input {self.name} cannot be read: {error.strerror}") from None

    def _open(self) -> FileIO:
        return FileIO(0, closefd=False) if self.name == STANDARD_INPUT else FileIO(self.name)


class _Splitter:
    """Splits chunks of a file into lines, and numbers them."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0
        self._too_long = False

    def feed(self, chunk: bytes) -> Iterator[Numbered]:
        """The lines that end in the chunk, without blank ones; None stands for one too long.

        An empty chunk ends the input.
        """
        if not chunk and not self._rest and not self._too_long:
            return
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop() if chunk else b""
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self._too_long = b"", True
        for text in lines:
            self._number += 1
            if self._too_long or len(text) > MAX_LINE_BYTES:
                self._too_long = False
                yield self._number, None
            elif text.strip():
                yield self._number, text


class _End:
    """Stands for the end of an iterator in a queue."""


class _Failure(Generic[Part]):
    """An error of an iterator in a queue."""

    def __init__(self, error: Exception) -> None:
        self.error = error


async def streamed(parts: Callable[[], Iterator[Part]]) -> AsyncIterator[Part]:
    """The parts of an iterator that a thread runs, at most two ahead.

    The thread is a daemon, so that it does not keep the process alive after an interrupt.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Part | _Failure[Part] | _End] = asyncio.Queue(2)

    def put(part: Part | _Failure[Part] | _End) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(part), loop).result()

    def read() -> None:
        try:
            try:
                for part in parts():
                    put(part)
            except Exception as error:
                put(_Failure(error))
            else:
                put(_End())
        except (RuntimeError, CancelledError):  # the loop has ended
            return

    threading.Thread(target=read, name="input", daemon=True).start()
    while not isinstance(part := await queue.get(), _End):
        if isinstance(part, _Failure):
            raise part.error
        yield part
