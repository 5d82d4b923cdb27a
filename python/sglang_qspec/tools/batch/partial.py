"""What has been written of the answers to lines that are being asked, in memory and in a file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from sglang_qspec.guess_tags import GuessLimits
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.guesses.guess import Guess

logger = logging.getLogger(__name__)

MAX_CHARS = GuessLimits().max_chars
"""Characters that are kept of a text: a server takes no longer guess by default."""
MAX_BYTES = 64 << 20
"""Maximum size of the file when it is written anew; texts that do not fit are left out."""
MIN_BYTES = 4 << 20
"""The file is written anew when it is twice as long as after the last time, and this long."""


class _Piece(msgspec.Struct):
    """A line of the file: the text of a request's answer from character `at` on."""

    request: str
    """Digest of the request."""
    at: int
    text: str
    tokens: int
    """Number of tokens of the whole text."""


@dataclass
class _Partial:
    """The newest text of a line."""

    request: str
    guess: Guess
    stored: int = 0
    """Number of its characters that the file has."""


class Partials:
    """The texts of unfinished answers. A line that is asked again sends its text as a guess.

    Each note appends one piece of one text with one system call; there is at most one a second for
    each line. A killed process leaves at most one torn piece, which the next one ignores. A text
    belongs to a request: if a line of the input has changed, its text is not found. The file is a
    cache. Without it, lines are asked without guesses.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is that of the file; None keeps the texts in memory alone."""
        self._path = path
        """None also after the file could not be written."""
        self._descriptor: int | None = None
        self._size = 0
        """Size of the file that this process writes, in bytes."""
        self._limit = 0
        """Size from which on the file is written anew."""
        self._known: dict[str, Guess] = {}
        """Texts of an earlier process, by request."""
        self._running: dict[int, _Partial] = {}
        """Texts of unsettled lines, by the number of the line."""

    @classmethod
    def open(cls, path: Path | None, *, resume: bool) -> Self:
        """With `resume` read the texts of the file; otherwise remove it."""
        partials = cls(path)
        if resume:
            if path is not None:
                partials._load(path)
        else:
            partials.remove()
        return partials

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def find(self, line: Line) -> Guess | None:
        """The newest text of the line's answer, if an attempt was cut."""
        found = self._partial(line).guess
        return found if found.text else None

    def note(self, line: Line, guess: Guess) -> None:
        """Keep the text of the line's answer so far.

        A beginning of the kept text changes nothing: it repeats the attempt before.
        """
        partial = self._partial(line)
        before = partial.guess.text
        text = guess.text[:MAX_CHARS]
        if before.startswith(text):
            return
        if not text.startswith(before):
            partial.stored = 0
        partial.guess = Guess(text, max(1, guess.tokens * len(text) // len(guess.text)))
        self._write(partial)

    def settle(self, line: Line) -> None:
        """Forget the text of a line that has its record."""
        self._running.pop(line.number, None)

    def remove(self) -> None:
        """Remove the file, for example because all lines have their records."""
        self._close()
        self._running.clear()
        if self._path is not None:
            for path in (self._path, _new(self._path)):  # a killed process may have left the other
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _partial(self, line: Line) -> _Partial:
        partial = self._running.get(line.number)
        if partial is None:
            digest = blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16)
            digest.update(b"\0" + line.body)
            request = digest.hexdigest()
            partial = _Partial(request, self._known.pop(request, Guess("", 0)))
            self._running[line.number] = partial
        return partial

    def _write(self, partial: _Partial) -> None:
        """Append what the file lacks of a text, or write the file anew."""
        if self._path is None:
            return
        piece = _encoded(partial.request, partial.guess, partial.stored)
        try:
            if self._size + len(piece) > self._limit:
                self._write_anew(self._path)
            else:
                self._append(piece)
                partial.stored = len(partial.guess.text)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); if the batch is killed, it asks its unfinished lines "
                "again without guesses",
                *(self._path, error.strerror),
            )
            self._path = None

    def _append(self, piece: bytes) -> None:
        """Write a piece. Raises OSError, also if the disk does not take it whole."""
        assert self._descriptor is not None
        if os.write(self._descriptor, piece) < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(piece)

    def _write_anew(self, path: Path) -> None:
        """Replace the file by one that has the newest texts alone. Raises OSError."""
        self._close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._descriptor = os.open(_new(path), flags, 0o644)
        self._size = 0
        for request, guess in self._known.items():
            self._fill(request, guess)
        for partial in self._running.values():
            partial.stored = self._fill(partial.request, partial.guess)
        os.replace(_new(path), path)
        self._limit = max(MIN_BYTES, 2 * self._size)

    def _fill(self, request: str, guess: Guess) -> int:
        """Write a text if the file has room for it; returns how much is written, in characters.

        Raises OSError.
        """
        piece = _encoded(request, guess, 0)
        if not guess.text or self._size + len(piece) > MAX_BYTES:
            return 0
        self._append(piece)
        return len(guess.text)

    def adopt(self, path: Path) -> None:
        """Take over the texts of another process, and remove its file."""
        self._load(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        """Read the file of an earlier process, and ignore what is no piece of a text."""
        try:
            with path.open("rb") as file:
                while line := file.readline(MAX_BYTES):
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        self._take(msgspec.json.decode(line, type=_Piece))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be read (%s), so it gives no guesses", path, error.strerror)

    def _take(self, piece: _Piece) -> None:
        """Add a piece to the text that it continues, or begins again."""
        before = self._known.get(piece.request, Guess("", 0)).text
        if 0 <= piece.at <= len(before):
            text = before[: piece.at] + piece.text
            self._known[piece.request] = Guess(text[:MAX_CHARS], max(1, piece.tokens))

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _new(path: Path) -> Path:
    """Where the file is written anew, before it replaces the one at `path`."""
    return path.with_name(path.name + ".new")


def _encoded(request: str, guess: Guess, at: int) -> bytes:
    """The piece of a text from a character on."""
    return msgspec.json.encode(_Piece(request, at, guess.text[at:], guess.tokens)) + b"\n"
