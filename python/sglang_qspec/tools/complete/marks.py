"""Marks drafted text in the output: by colour, or in brackets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sglang_qspec.draft_source import SOURCES
from sglang_qspec.tools.complete.stretches import Stretch

TARGET = "target"
COLOURS = dict(zip(SOURCES, itertools.cycle((32, 35, 33, 34, 36, 31, 91, 95)), strict=False))
"""ANSI colour of each source; the target's own text keeps the terminal's colour."""


class Brackets:
    """Marks text as `[queue: drafted text]`, for files; a stretch may come in several pieces."""

    def __init__(self) -> None:
        self._open = TARGET

    def mark(self, stretch: Stretch) -> str:
        """The text of a stretch, marked."""
        begin = "" if stretch.source in (self._open, TARGET) else f"[{stretch.source}:"
        return self._close_unless(stretch.source) + begin + stretch.text

    def end(self) -> str:
        """The text that closes the last stretch."""
        return self._close_unless(TARGET)

    def name(self, source: str) -> str:
        """The name of a source, as the summary shows it."""
        return source

    def _close_unless(self, source: str) -> str:
        before, self._open = self._open, source
        return "" if before in (source, TARGET) else "]"


class Colours:
    """Marks text with a colour for each source, for a terminal."""

    def mark(self, stretch: Stretch) -> str:
        """The text of a stretch, coloured."""
        return self._paint(stretch.text, stretch.source)

    def end(self) -> str:
        """The text that closes the last stretch: empty, because `mark` closes each stretch."""
        return ""

    def name(self, source: str) -> str:
        """The name of a source in its colour, which makes the summary a legend."""
        return self._paint(source, source)

    def _paint(self, text: str, source: str) -> str:
        colour = COLOURS.get(source)
        return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"


Marks = Brackets | Colours


def summary(provenance: Sequence[str], passes: int, marks: Marks) -> str:
    """One line: the number of tokens of each source, and of target passes."""
    counts = {name: provenance.count(name) for name in (*COLOURS, TARGET)}
    parts = [f"{count} {marks.name(name)}" for name, count in counts.items() if count]
    return f"{len(provenance)} tokens in {passes} passes: {', '.join(parts)}"
