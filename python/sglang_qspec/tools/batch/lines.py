"""Reads the lines of the input: all of them once to check them, and again to ask them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch.digests import Digests
from sglang_qspec.tools.batch.line import Line, parse, reseeded
from sglang_qspec.tools.batch.source import MAX_LINE_BYTES, LineSource, streamed

logger = logging.getLogger(__name__)

SHOWN = 20
"""Maximum number of bad lines that an error lists."""


@dataclass
class Lines:
    """The lines of an input that have no answer yet."""

    source: LineSource
    max_tokens: int | None = None
    """Length of answers that a line does not limit; None leaves that to the server."""
    skip_invalid: bool = False
    answered: Digests = field(default_factory=Digests)
    """The custom_ids of the lines to leave out."""
    endpoint: str | None = None
    """The only allowed endpoint of a line; None allows all."""
    total: int | None = None
    """Number of valid lines; None before `check`, and for an input that can be read once."""
    invalid: int = 0
    """Number of lines that were left out because they are not valid."""

    bad: list[tuple[int, str]] = field(default_factory=list)
    """Number and message of the first lines that are not valid, at most SHOWN of them."""

    def check(self) -> None:
        """Read the input once: count its lines, and check them and `answered`.

        Raises BatchError with the numbers of the first bad lines, or if the output has answers to
        other lines.
        """
        found = self.scan()
        bad = [f"line {number}: {message}" for number, message in self.bad]
        more = self.invalid - len(bad)
        bad += [f"and {more} more lines"] if more else []
        if bad and not self.skip_invalid:
            heading = f"{self.source.name}: correct these lines, or give --skip-invalid:"
            raise BatchError("\n".join((heading, *bad)))
        for message in bad:
            logger.warning("left out: %s", message)
        if found < len(self.answered):
            raise BatchError(
                f"the output has {len(self.answered) - found} answers to lines that "
                f"{self.source.name} does not have; continue with the input that the output "
                "belongs to"
            )

    def scan(self) -> int:
        """Read the input once: count its lines, and note those that are not valid.

        Returns the number of lines that have an answer. Raises BatchError if the input cannot be
        read.
        """
        valid = found = 0
        seen = Digests()
        for number, text in itertools.chain.from_iterable(self.source.parts()):
            line = self._read(number, text, seen)
            if isinstance(line, Line):
                valid += 1
                found += line.custom_id in self.answered
            else:
                self.invalid += 1
                if len(self.bad) < SHOWN:
                    self.bad.append((number, line))
        self.total = valid
        return found

    async def unanswered(self) -> AsyncIterator[Line]:
        """The lines to ask, in the order of the input. Raises BatchError for a bad line.

        After `check` bad lines are left out without another message.
        """
        seen, bodies = Digests(), Digests()
        async for number, text in streamed(self.source):
            line = self._read(number, text, seen)
            if isinstance(line, Line):
                line = reseeded(line, bodies)
                if line.custom_id not in self.answered:
                    yield line
            elif self.total is None:
                self._refuse(f"line {number}: {line}")

    def _refuse(self, message: str) -> None:
        """Leave out a bad line of an input that was not checked, or raise BatchError."""
        if not self.skip_invalid:
            raise BatchError(f"the input has a bad line: {message}")
        self.invalid += 1
        logger.warning("left out: %s", message)

    def _read(self, number: int, text: bytes | None, seen: Digests) -> Line | str:
        """The line, or a message if it is not valid."""
        try:
            if text is None:
                raise ValueError(f"is longer than {MAX_LINE_BYTES >> 20} MiB")
            line = parse(number, text, self.max_tokens)
            if self.endpoint not in (None, line.url):
                raise ValueError(f"url is {line.url!r}, but must be {self.endpoint!r}")
            if not seen.add(line.custom_id):
                raise ValueError(f"custom_id {line.custom_id!r} is that of an earlier line too")
        except ValueError as error:
            return str(error)
        except RecursionError:
            return "has too many brackets inside each other"
        return line
