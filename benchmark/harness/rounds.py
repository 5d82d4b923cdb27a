"""Repeats the cells of a benchmark in rounds, and takes figures of all rounds of a row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmark.harness.run import Run, identical_share
from benchmark.harness.statistics import Medians

Cell = TypeVar("Cell", bound=Any)
"""A frozen dataclass with the field `round`, from 1."""


def in_turn(first: Sequence[Cell], rounds: int) -> list[Cell]:
    """The cells of all rounds, given those of the first; every second round is reversed."""
    return [
        replace(cell, round=number)
        for number in range(1, rounds + 1)
        for cell in (first if number % 2 else first[::-1])
    ]


def identical(rounds: Mapping[int, Run], others: Mapping[int, Run]) -> float | None:
    """Mean share of equal outputs in the common rounds, from 0 to 1; None without such rounds."""
    shared = rounds.keys() & others.keys()
    shares = [identical_share(rounds[number], others[number]) for number in shared]
    return statistics.fmean(shares) if shares else None


@dataclass(frozen=True)
class MeasuredRounds:
    """The runs of a row of a report."""

    rounds: Mapping[int, Run]
    """By the number of the round."""

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds."""
        found: float = Medians(tuple(self.rounds.values())).tokens_per_s
        return found

    @property
    def others_share(self) -> float:
        """Largest share of all processors that other processes took in a round."""
        return max(run.others_share for run in self.rounds.values())
