"""How drafted text is told from the target's own: by colour, or in brackets."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_qspec.complete.stretches import Stretch

TARGET = "target"
COLOURS = {"queue": 32, "step": 36, "guess": 35, "prompt": 33, "output": 34}
"""ANSI colours by source; the target's own text has the terminal's."""


class Brackets:
    """`[queue: drafted text]`: also in a file. A stretch may come in pieces."""

    def __init__(self) -> None:
        self._open = TARGET

    def mark(self, stretch: Stretch) -> str:
        """The text of a stretch, marked."""
        begin = "" if stretch.whose in (self._open, TARGET) else f"[{stretch.whose}:"
        return self._close_unless(stretch.whose) + begin + stretch.text

    def end(self) -> str:
        """What closes the last stretch."""
        return self._close_unless(TARGET)

    def name(self, whose: str) -> str:
        """A source's name, as the summary has it."""
        return whose

    def _close_unless(self, whose: str) -> str:
        before, self._open = self._open, whose
        return "" if before in (whose, TARGET) else "]"


class Colours:
    """A colour for each source, for a terminal."""

    def mark(self, stretch: Stretch) -> str:
        """The text of a stretch, coloured."""
        return self._paint(stretch.text, stretch.whose)

    def end(self) -> str:
        """Every stretch is closed already."""
        return ""

    def name(self, whose: str) -> str:
        """A source's name in its colour, which makes the summary a legend."""
        return self._paint(whose, whose)

    def _paint(self, text: str, whose: str) -> str:
        colour = COLOURS.get(whose)
        return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"


Marks = Brackets | Colours


def summary(whose: Sequence[str], passes: int, marks: Marks) -> str:
    """How many tokens are whose, in the order of COLOURS, in how many passes of the target."""
    counts = {name: whose.count(name) for name in (*COLOURS, TARGET)}
    parts = [f"{count} {marks.name(name)}" for name, count in counts.items() if count]
    return f"{len(whose)} tokens in {passes} passes: {', '.join(parts)}"
