"""Drafting ahead of the same batch that is being verified, as a renewal process.

Each request has one greedy draft, the chain, that runs up to `lookahead` tokens ahead of what is
committed. All chains that are not that long grow by a token in a draft step, of d seconds for the
batch, and they go on growing while the target verifies. A pass verifies the first k tokens of a
chain, or all that there are. If the target accepts them, and its own next token is the chain's
too, what is left of the chain is the next pass's start; otherwise a new chain begins, with
nothing. So a chain of n verified tokens lives on with chance alpha^(n+1), and the lengths at the
starts of passes are a renewal process: from an empty chain to the next one.

A pass waits for another draft step as long as the step's tokens come at a better rate than the
pipeline's as a whole. The chains of a batch wait together, but are taken to be of independent
lengths, and of the others it counts how many are empty; so the rule is exact for one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

POLICIES = 4
"""Policies of waiting that are tried, each from the rate of the last; two or three are enough."""
GAIN = 1e-3
"""By which another policy has to be better, relative to the last."""
PASSES = 200
"""In the life of a chain that are followed one by one."""
NEGLIGIBLE = 1e-5
"""Chance that is left out, and relative change that is none."""

Waits = list[list[tuple[int, float]]]
"""Numbers of draft steps that a pass waits for, with their chances, by the length of a chain where
the last pass ended: 0 to k, and k for all that are longer."""


def ahead(
    alpha: float, k: int, requests: int, verify: float, step: float, lookahead: int
) -> tuple[float, float]:
    """Expected tokens of a request in a pass, and seconds from one pass to the next.

    `verify` is a pass's seconds, and `step` a draft step's, both for the whole batch.
    """
    powers = [1.0]
    for _ in range(lookahead + 1):
        powers.append(powers[-1] * alpha)
    yields = [1.0]
    for power in powers[1 : k + 1]:
        yields.append(yields[-1] + power)
    steps = min(float(lookahead), verify / step) if step > 0.0 else float(lookahead)
    waits: Waits = [[(0, 1.0)]] * (k + 1)
    best = (0.0, 1.0, verify)  # rate, tokens, seconds
    for _ in range(POLICIES):
        lengths = _lengths(powers, k, lookahead, steps, waits)
        tokens = waited = 0.0
        for length, share in enumerate(lengths):
            for wait, chance in waits[min(length, k)]:
                tokens += share * chance * yields[min(length + wait, k)]
                waited += share * chance * wait
        seconds = verify + waited * step
        rate = requests * tokens / seconds
        if rate <= best[0] * (1.0 + GAIN):
            break
        best = (rate, tokens, seconds)
        waits = _waits(powers, k, requests, lengths, step * rate)
    return best[1], best[2]


def _lengths(
    powers: Sequence[float], k: int, lookahead: int, steps: float, waits: Waits
) -> list[float]:
    """The share of each length, 0 to `lookahead`, that chains have where passes end.

    `steps` is how many draft steps fit into a pass; of a fraction it is left to chance whether
    one more does.
    """
    whole = int(steps)
    part = steps - whole
    visits = [0.0] * (lookahead + 1)
    chances, left = {0: 1.0}, 1.0
    for _ in range(PASSES):
        following: dict[int, float] = {}
        for length, chance in chances.items():
            visits[length] += chance
            for wait, waited in waits[min(length, k)]:
                start = min(lookahead, length + wait)
                verified = min(start, k)
                lives = chance * waited * powers[verified + 1]
                for grown, share in ((whole, 1.0 - part), (whole + 1, part)):
                    rest = min(lookahead, start + grown) - verified - 1
                    if rest >= 0 and share > 0.0:
                        following[rest] = following.get(rest, 0.0) + lives * share
        before, left = left, sum(following.values())
        if left < NEGLIGIBLE:
            break
        ratio = left / before
        if _proportional(chances, following, ratio):
            if ratio > 1.0 - 1e-12:  # it lives for ever, and this is how
                visits = [0.0] * (lookahead + 1)
                ratio = 0.0
            for length, chance in following.items():
                visits[length] += chance / (1.0 - ratio)
            break
        chances = following
    scale = 1.0 / sum(visits)
    return [visit * scale for visit in visits]


def _proportional(before: dict[int, float], after: dict[int, float], ratio: float) -> bool:
    """Whether a pass changes the lengths of the chains that live by nothing but their number."""
    if before.keys() != after.keys():
        return False
    change = sum(abs(after[length] - ratio * chance) for length, chance in before.items())
    return change <= NEGLIGIBLE * sum(after.values())


def _waits(
    powers: Sequence[float], k: int, requests: int, lengths: Sequence[float], worth: float
) -> Waits:
    """Which steps gain more than `worth`, the tokens that the pipeline yields in the time of one.

    Step j adds token length + j to a chain, which is accepted with chance alpha^(length + j): own
    of the request itself, alpha^j of each other whose chain is empty, and `longer` of the rest.
    With n others empty it is waited for where
    own + n alpha^j + (requests - 1 - n) longer > worth, which gives the least such n.
    """
    others = requests - 1
    tail = _tail(others, lengths[0])
    alive = 1.0 - lengths[0]
    rest = [
        sum(lengths[length] * powers[length + j] for length in range(1, k + 1 - j)) / alive
        if alive > NEGLIGIBLE
        else 0.0
        for j in range(1, k + 1)
    ]
    waits: Waits = []
    for length in range(k + 1):
        steps = []
        least, chance = 0, 1.0
        for j, longer in enumerate(rest, 1):
            own = powers[length + j] if length + j <= k else 0.0
            missing = worth - own - others * longer
            each = powers[j] - longer
            if missing >= 0.0:
                if missing >= each * others:
                    break
                least = max(least, int(missing / each) + 1)
            steps.append((j - 1, chance - tail[least]))
            chance = tail[least]
        steps.append((len(steps), chance))
        waits.append([(wait, share) for wait, share in steps if share > NEGLIGIBLE])
    return waits


def _tail(trials: int, chance: float) -> list[float]:
    """The chances that at least 0, 1, ... of so many independent trials succeed."""
    tail = [0.0] * (trials + 2)
    for n in range(trials, -1, -1):
        tail[n] = tail[n + 1] + _binomial(trials, n, chance)
    return tail


def _binomial(trials: int, n: int, chance: float) -> float:
    if not 0.0 < chance < 1.0:
        return float(n == (trials if chance >= 1.0 else 0))
    ways = math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
    return math.exp(ways + n * math.log(chance) + (trials - n) * math.log1p(-chance))
