"""Lists the cases of `bench_worst_case`, in which drafts do not pay, and the cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.harness.cells import Cell, in_turn

GUESSES = "wrong-guesses"
SIDECAR = "wrong-sidecar"
RANDOM = "random-text"
LONG = "long-context"
SPEC_BENCH = "spec-bench"

BASELINE = "none"
ADAPTIVE = "adaptive"
ONE_WIDTH = "one-width"
"""Name of the configuration with adaptive passes in which all requests have one width."""
FIXED = "width-"
"""Prefix of a fixed width, in tokens of a request in every pass."""


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    name: str
    text: str
    """Description for --help."""
    sources: tuple[str, ...] = ()
    """Allowed draft sources; all if empty."""
    temperature: float = 0.0
    misled: bool = False
    """Whether the wrong sidecar drafts."""


CASES = (
    Case(
        GUESSES,
        "guesses of the client that resemble the answer, but propose only wrong tokens",
        ("guess",),
    ),
    Case(
        SIDECAR,
        "a sidecar that drafts only wrong tokens, as fast as a good one",
        ("queue", "step"),
        misled=True,
    ),
    Case(RANDOM, "prompts of random tokens, at temperature 1.5", temperature=1.5),
    Case(LONG, "prompts of thousands of tokens that differ only at the end"),
    Case(SPEC_BENCH, "prompts of Spec-Bench, two for each request in flight"),
)
BY_NAME = {case.name: case for case in CASES}
SHOWN = {
    SPEC_BENCH: "Spec-Bench",
    RANDOM: "random text",
    LONG: "long contexts",
    GUESSES: "wrong guesses",
    SIDECAR: "wrong sidecar",
}
"""Names of the cases in the chart."""


def cells_of(
    cases: Iterable[str], levels: Sequence[int], widths: Sequence[int], rounds: int
) -> list[Cell]:
    """All cells; every second round has the reverse order.

    Only Spec-Bench has configurations with fixed widths, and one with a width that all requests of
    a pass share.
    """
    first = []
    for case in cases:
        others = [ONE_WIDTH, *(f"{FIXED}{width}" for width in widths)]
        fixed = others if case == SPEC_BENCH else []
        first += [
            Cell.of(1, config, case=case, in_flight=level)
            for level in levels
            for config in (BASELINE, ADAPTIVE, *fixed)
        ]
    return in_turn(first, rounds)


def width_of(config: str) -> int | None:
    """The width of a configuration with a fixed width; None for the others."""
    return int(config.removeprefix(FIXED)) if config.startswith(FIXED) else None
