"""The pipeline `ahead`, which drafts for the batch that is being verified, as a renewal process.

Each request has one greedy draft, its chain, of at most `lookahead` tokens after the committed
ones. A draft step of d seconds extends every shorter chain of the batch by one token. Draft steps
go on while the target verifies. A pass verifies the first k tokens of a chain, or all if it is
shorter. If the target accepts them and its next token is the chain's too, the next pass starts with
the rest of the chain. Otherwise a new, empty chain begins. So a chain survives a pass over n of its
tokens with probability alpha^(n+1), and the chain lengths at the ends of passes are a renewal
process.

A pass waits for another draft step as long as the step yields tokens at a higher rate than the
pipeline on average. The model assumes that the chains of a batch have independent lengths. For the
other requests it considers only the number of empty chains, so it is exact for one request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

POLICIES = 4
"""Maximum number of iterations of the wait rule; each uses the rate of the one before."""
GAIN = 1e-3
"""Relative gain in the rate below which the iteration stops."""
PASSES = 200
"""Maximum number of passes in the life of a chain that are computed one by one."""
NEGLIGIBLE = 1e-5
"""Probability, and relative change, that is neglected."""

Waits = list[list[tuple[int, float]]]
"""For each chain length at the end of the last pass (0 to k; k stands for all longer chains): pairs
of the number of draft steps that the pass waits for and its probability."""


def ahead(
    alpha: float, k: int, requests: int, verify: float, step: float, lookahead: int
) -> tuple[float, float]:
    """Expected tokens of one request per pass, and seconds from one pass to the next.

    `verify` and `step` are the seconds of a pass and of a draft step for the whole batch.
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
    """The distribution of the chain length, 0 to `lookahead`, at the ends of passes.

    `steps` is the number of draft steps during a pass. Its fractional part is the probability of
    one more step.
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
            if ratio > 1.0 - 1e-12:  # chains never end: this is the stationary distribution
                visits = [0.0] * (lookahead + 1)
                ratio = 0.0
            for length, chance in following.items():
                visits[length] += chance / (1.0 - ratio)
            break
        chances = following
    scale = 1.0 / sum(visits)
    return [visit * scale for visit in visits]


def _proportional(before: dict[int, float], after: dict[int, float], ratio: float) -> bool:
    """Whether a pass has scaled all entries of the distribution by the same `ratio`."""
    if before.keys() != after.keys():
        return False
    change = sum(abs(after[length] - ratio * chance) for length, chance in before.items())
    return change <= NEGLIGIBLE * sum(after.values())


def _waits(
    powers: Sequence[float], k: int, requests: int, lengths: Sequence[float], worth: float
) -> Waits:
    """The draft steps that gain more than `worth`, the tokens that the pipeline yields in a step's
    time.

    Step j adds token length + j to a chain, which is accepted with probability alpha^(length + j).
    It gains `own` tokens for the request itself, alpha^j for each other request with an empty
    chain, and `longer` on average for each of the rest. With n other chains empty, the pass waits
    for the step if own + n alpha^j + (requests - 1 - n) longer > worth. `least` is the smallest n
    for which the pass waits.
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
    """The probabilities that at least 0, 1, ... of `trials` independent trials succeed."""
    tail = [0.0] * (trials + 2)
    for n in range(trials, -1, -1):
        tail[n] = tail[n + 1] + _binomial(trials, n, chance)
    return tail


def _binomial(trials: int, n: int, chance: float) -> float:
    if not 0.0 < chance < 1.0:
        return float(n == (trials if chance >= 1.0 else 0))
    ways = math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
    return math.exp(ways + n * math.log(chance) + (trials - n) * math.log1p(-chance))
