"""Text for a terminal: tables, and numbers with their nouns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of a table: the first one left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or, with an s, in the plural."""
    return f"{number} {noun}{'s' * (number != 1)}"
