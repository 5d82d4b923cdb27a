"""A cell of a benchmark: a configuration that serves a load in a round.

The dimensions of a load have names, such as `in_flight` for the requests in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

Item = TypeVar("Item")
Value = str | int | float | bool | None


@dataclass(frozen=True)
class Cell:
    """A configuration that serves a load in a round."""

    round: int
    """From 1."""
    config: str
    """Name of the configuration."""
    load: tuple[tuple[str, Value], ...] = ()
    """The dimensions of the load, each with its name."""

    @classmethod
    def of(cls, number: int, config: str, **load: Value) -> Self:
        """The cell of a load in round `number`."""
        return cls(number, config, tuple(load.items()))

    def __getitem__(self, dimension: str) -> Any:
        """The value of a dimension; None if the load does not have it."""
        return dict(self.load).get(dimension)

    @property
    def place(self) -> str:
        """Load and configuration in words."""
        named = [f"{name.replace('_', ' ')} {value}" for name, value in self.load]
        return ", ".join([*named, self.config])

    def __str__(self) -> str:
        return f"round {self.round}, {self.place}"


def in_turn(first: Sequence[Cell], rounds: int) -> list[Cell]:
    """The cells of all rounds, given those of the first; every second round is reversed."""
    return [
        replace(cell, round=number)
        for number in range(1, rounds + 1)
        for cell in turned(first, number)
    ]


def turned(items: Sequence[Item], number: int) -> Sequence[Item]:
    """The items in the order of round `number`: even rounds have the reverse order."""
    return items if number % 2 else items[::-1]
