"""Simulates the pipelines token by token, as a reference for the formulas.

The simulations share no code with `sglang_qspec.policy`. A random draw at verification decides
whether the target agrees with a draft token, and time advances step by step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Drafter:
    """Extends the chains of several requests in batched steps of `step` seconds.

    A chain that begins during a step gets its first token in the next step.
    """

    chains: list[int]
    """Number of draft tokens ahead of the committed output, for each request."""
    step: float
    lookahead: int
    now: float = 0.0
    under_way: list[int] | None = None
    """Requests that the running step extends; None between steps."""
    ends: float = 0.0

    def run(self, until: float) -> None:
        """Draft until this time, in seconds."""
        while True:
            if self.under_way is None:
                growing = [i for i, length in enumerate(self.chains) if length < self.lookahead]
                if not growing:
                    break
                self.under_way, self.ends = growing, self.now + self.step
            if self.ends > until:
                break
            for i in self.under_way:
                self.chains[i] = min(self.lookahead, self.chains[i] + 1)
            self.now, self.under_way = self.ends, None
        self.now = max(self.now, until)

    def begin(self, request: int, length: int, *, anew: bool) -> None:
        """After a commit, keep `length` tokens of the request's chain, or begin it `anew`."""
        self.chains[request] = length
        if anew and self.under_way is not None and request in self.under_way:
            self.under_way.remove(request)


def accepted(rng: random.Random, alpha: float, tokens: int) -> int:
    """Number of draft tokens, out of `tokens`, before the first rejected token."""
    for index in range(tokens):
        if rng.random() >= alpha:
            return index
    return tokens


def in_turn(alpha: float, k: int, verify: float, draft: float, rounds: int) -> tuple[float, float]:
    """Tokens of a request per round of drafting and then verifying, and seconds per round."""
    rng = random.Random(1)
    tokens = sum(accepted(rng, alpha, k) + 1 for _ in range(rounds))
    return tokens / rounds, verify + draft


def alternating(verify: float, draft: float, rounds: int) -> float:
    """Seconds per round of two halves; the drafter and the target each serve one at a time."""
    target = drafter = 0.0  # seconds at which each is free
    committed = [0.0, 0.0]  # seconds at which each half's last pass ended
    for number in range(2 * rounds):
        half = number % 2
        drafter = max(drafter, committed[half]) + draft
        target = max(target, drafter) + verify
        committed[half] = target
    return target / rounds


def ahead(
    alpha: float,
    k: int,
    requests: int,
    verify: float,
    step: float,
    lookahead: int,
    *,
    passes: int,
    least: int = 0,
) -> tuple[float, float]:
    """Tokens of a request per pass, and seconds per pass, for drafts that run ahead of the target.

    A pass waits until every chain has `least` tokens.
    """
    rng = random.Random(2)
    drafter = Drafter([0] * requests, step, lookahead)
    now = 0.0
    tokens = 0
    for _ in range(passes):
        while min(drafter.chains) < least:
            now = max(now, drafter.now if drafter.under_way is None else drafter.ends)
            drafter.run(now)
        verified = [min(length, k) for length in drafter.chains]
        now += verify
        drafter.run(now)
        for i, n in enumerate(verified):
            right = accepted(rng, alpha, n)
            tokens += right + 1
            rest = drafter.chains[i] - n - 1
            alive = right == n and rest >= 0 and rng.random() < alpha
            drafter.begin(i, rest if alive else 0, anew=not alive)
    return tokens / passes / requests, now / passes


def queue(alpha: float, k: int, again: float, passes: int) -> float:
    """Tokens per pass for a text that follows queue drafts, diverges, and matches again."""
    rng = random.Random(3)
    tokens = 0
    follows = False
    for _ in range(passes):
        if not follows:
            follows = rng.random() < again
        if not follows:
            tokens += 1
            continue
        right = accepted(rng, alpha, k)
        tokens += right + 1
        follows = right == k and rng.random() < alpha
    return tokens / passes
