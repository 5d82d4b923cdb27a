"""Loads for `DraftTrials`: the output tokens per second of each use, and the rounds that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from sglang_qspec.policy import AnswerKind, DraftTrials, DraftUse

PASS_S = 0.1
ALL, SEQUENTIAL, HALVES, TEXTS, NONE = DraftUse
GREEDY, SAMPLED, GRAMMAR, GUESSED, MIXED = AnswerKind
Rates = Mapping[DraftUse, float] | Callable[[DraftUse], float]
"""Tokens per second by use."""


def rates(drafts: float, texts: float, none: float = 10.0) -> Rates:
    return {ALL: drafts, TEXTS: texts, NONE: none}


def serve(
    trials: DraftTrials,
    rate: Rates,
    seconds: float,
    *,
    requests: int = 2,
    kind: AnswerKind = MIXED,
    drafted: float = 0.0,
    plain_rate: float = 10.0,
    proposed: DraftUse = ALL,
    promised: bool = False,
    weight: float = 0.0,
    reading: float = 0.0,
    last: float = 1.0,
    left: float = math.inf,
    certainty: float = 0.0,
) -> Iterator[DraftUse]:
    """Uses of the rounds of a load with this `rate`.

    `drafted` is the share of the tokens that the sidecar drafts while it has its cores. `weight`,
    `reading`, `left` and `certainty` are those of `DraftTrials.choose`. A pass with drafts brings
    the last request `last` tokens further, and a pass without drafts one token.
    """
    for _ in range(round(seconds / PASS_S)):
        use = trials.choose(
            requests,
            kind=kind,
            proposed=proposed,
            promised=lambda: promised,
            weight=weight,
            reading=reading,
            left=lambda: left,
            certainty=certainty,
        )
        tokens = round((rate(use) if callable(rate) else rate[use]) * PASS_S)
        by_sidecar = round(drafted * tokens) if use is ALL else 0
        progress = 1 if use is NONE else last
        trials.observe(tokens, by_sidecar, PASS_S, plain_rate, progress=progress)
        yield use


def share(uses: Iterator[DraftUse], *wanted: DraftUse) -> float:
    """Share of the rounds with one of the `wanted` uses, ALL by default."""
    found = list(uses)
    return sum(use in (wanted or (ALL,)) for use in found) / len(found)
