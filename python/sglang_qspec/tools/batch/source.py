"""Where the lines of an input come from: a file, standard input or a pipe."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from io import FileIO
from typing import Protocol, TypeVar

from sglang_qspec.errors import BatchError

STANDARD_INPUT = "-"
PARQUET = ".parquet"
"""How the name of a Parquet file, or of a folder of such files, ends."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line, so that an input without line ends cannot fill the memory."""
CHUNK_BYTES = 256 << 10

Numbered = tuple[int, bytes | None]
"""The number of a line, from 1, and its text; None stands for a text that is too long."""
Result = TypeVar("Result")


class LineSource(Protocol):
    """An input, as numbered lines without the blank ones."""

    @property
    def name(self) -> str:
        """What messages call the input."""

    @property
    def can_be_read_once(self) -> bool:
        """Whether reading uses the input up."""

    def parts(self) -> Iterator[list[Numbered]]:
        """All lines, some at a time. Raises BatchError if the input cannot be read."""


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

    def parts(self) -> Iterator[list[Numbered]]:
        """All lines, some at a time. Raises BatchError if the input cannot be read."""
        splitter = _Splitter()
        try:
            with self._open() as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield list(splitter.feed(chunk))
                yield list(splitter.feed(b""))
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


async def streamed(source: LineSource) -> AsyncIterator[Numbered]:
    """All lines; the event loop goes on while the input blocks. Raises BatchError."""
    parts = source.parts()
    while (part := await _in_thread(lambda: next(parts, None))) is not None:
        for numbered in part:
            yield numbered


async def _in_thread(call: Callable[[], Result]) -> Result:
    """The result of a call in a thread.

    The thread is a daemon, so that it does not keep the process alive after an interrupt.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # from now on it gets its result in any case

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="input", daemon=True).start()
    return await asyncio.wrap_future(future)
