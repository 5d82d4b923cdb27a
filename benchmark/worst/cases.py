"""What is served: cases in which drafts do not pay, and Spec-Bench, by the requests in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GUESSES = "wrong-guesses"
SIDECAR = "wrong-sidecar"
RANDOM = "random-text"
LONG = "long-context"
SPEC_BENCH = "spec-bench"

BASELINE = "none"
ADAPTIVE = "adaptive"
FIXED = "width-"
"""And a number: each pass verifies so many tokens of each request."""


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    name: str
    text: str
    """What it is, for people."""
    sources: tuple[str, ...] = ()
    """That drafts may come from; all if empty."""
    temperature: float = 0.0
    misled: bool = False
    """Whether the sidecar is the one whose drafts are wrong."""


CASES = (
    Case(
        GUESSES,
        "the client's guesses resemble the answer, and each token that they propose is wrong",
        ("guess",),
    ),
    Case(
        SIDECAR,
        "all that the sidecar drafts is wrong, and comes in good time",
        ("queue", "step"),
        misled=True,
    ),
    Case(RANDOM, "prompts of random tokens, at temperature 1.5", temperature=1.5),
    Case(LONG, "prompts of thousands of tokens that have all but their ends in common"),
    Case(SPEC_BENCH, "prompts of Spec-Bench, two for each request in flight"),
)
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Block:
    """A case at some number of requests in flight: what all configurations serve in turn."""

    round: int
    """From 1."""
    case: str
    running: int
    """Requests that run at once."""
    configs: tuple[str, ...]
    """In the order in which they are served."""


def blocks_of(
    cases: Iterable[str], levels: Sequence[int], widths: Sequence[int], rounds: int
) -> list[Block]:
    """All of them, each round in the order opposite to the one before.

    Fixed widths are compared on Spec-Bench alone.
    """
    blocks = []
    for number in range(1, rounds + 1):
        served = []
        for case in cases:
            fixed = [f"{FIXED}{width}" for width in widths] if case == SPEC_BENCH else []
            configs = (BASELINE, ADAPTIVE, *fixed)
            turned = configs if number % 2 else configs[::-1]
            served += [Block(number, case, level, turned) for level in levels]
        blocks += served if number % 2 else served[::-1]
    return blocks


def width_of(config: str) -> int | None:
    """Of a configuration of one width; None for the others."""
    return int(config.removeprefix(FIXED)) if config.startswith(FIXED) else None
