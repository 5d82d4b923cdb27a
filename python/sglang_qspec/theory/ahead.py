"""Drafting ahead of the same batch that is being verified, as a renewal process.

Each request has one greedy draft, the chain, that runs up to `lead` tokens ahead of what is
committed. All chains that are not that long grow by a token in a draft step, of d seconds for the
batch, and they go on growing while the target verifies. A pass verifies the first k tokens of a
chain, or all that there are. If the target accepts them, and its own next token is the chain's
too, what is left of the chain is the next pass's start; otherwise a new chain begins, with
nothing. So a chain of n verified tokens lives on with chance alpha^(n+1), and the lengths at the
starts of passes are a renewal process: from an empty chain to the next one.

A pass waits for another draft step as long as the step's tokens come at a better rate than the
pipeline's as a whole. What the others of the batch gain by a step is taken at its mean, so the
rule is exact for one request and for very many.
"""

from __future__ import annotations

from collections.abc import Sequence

POLICIES = 5
"""Policies of waiting that are tried, each from the rate of the last; two or three are enough."""
PASSES = 200
"""In the life of a chain that are followed one by one."""
NEGLIGIBLE = 1e-7
"""Chance that is left out."""


def ahead(
    alpha: float, k: int, requests: int, verify: float, step: float, lead: int
) -> tuple[float, float]:
    """Expected tokens of a request in a pass, and seconds from one pass to the next.

    `verify` is a pass's seconds, and `step` a draft step's, both for the whole batch.
    """
    powers = [1.0]
    for _ in range(lead + 1):
        powers.append(powers[-1] * alpha)
    yields = [1.0]
    for power in powers[1 : k + 1]:
        yields.append(yields[-1] + power)
    steps = min(float(lead), verify / step) if step > 0.0 else float(lead)
    waits = [0] * (k + 1)
    best = (0.0, 1.0, verify)  # rate, tokens, seconds
    for _ in range(POLICIES):
        lengths = _lengths(powers, k, lead, steps, waits)
        tokens = waited = 0.0
        for length, share in enumerate(lengths):
            wait = waits[min(length, k)]
            tokens += share * yields[min(length + wait, k)]
            waited += share * wait
        seconds = verify + waited * step
        rate = requests * tokens / seconds
        if rate <= best[0]:
            break
        best = (rate, tokens, seconds)
        after = _waits(powers, k, requests, lengths, step * rate)
        if after == waits:
            break
        waits = after
    return best[1], best[2]


def _lengths(
    powers: Sequence[float], k: int, lead: int, steps: float, waits: Sequence[int]
) -> list[float]:
    """The share of each length, 0 to `lead`, that chains have where passes end.

    `steps` is how many draft steps fit into a pass; of a fraction it is left to chance whether
    one more does. `waits` has the draft steps that the next pass waits for, by the length.
    """
    whole = int(steps)
    part = steps - whole
    visits = [0.0] * (lead + 1)
    chances = {0: 1.0}
    for _ in range(PASSES):
        following: dict[int, float] = {}
        for length, chance in chances.items():
            visits[length] += chance
            start = min(lead, length + waits[min(length, k)])
            verified = min(start, k)
            lives = chance * powers[verified + 1]
            for grown, share in ((whole, 1.0 - part), (whole + 1, part)):
                rest = min(lead, start + grown) - verified - 1
                if rest >= 0 and share > 0.0:
                    following[rest] = following.get(rest, 0.0) + lives * share
        left = sum(following.values())
        if left < NEGLIGIBLE:
            break
        ratio = left / sum(chances.values())
        if _proportional(chances, following, ratio):
            if ratio > 1.0 - NEGLIGIBLE:  # it lives for ever, and this is how
                visits = [0.0] * (lead + 1)
                ratio = 0.0
            for length, chance in following.items():
                visits[length] += chance / (1.0 - ratio)
            break
        chances = following
    scale = 1.0 / sum(visits)
    return [visit * scale for visit in visits]


def _proportional(before: dict[int, float], after: dict[int, float], ratio: float) -> bool:
    """Whether a pass changes the lengths of the chains that live by nothing but their number."""
    return before.keys() == after.keys() and all(
        abs(after[length] - ratio * chance) <= NEGLIGIBLE * after[length]
        for length, chance in before.items()
    )


def _waits(
    powers: Sequence[float], k: int, requests: int, lengths: Sequence[float], worth: float
) -> list[int]:
    """Draft steps to wait for, by the length of a request's chain, 0 to k and more.

    `worth` is the tokens that the pipeline yields in the time of a step. The jth step adds token
    length + j to a chain, which is accepted with chance alpha^(length + j).
    """
    others = [
        (requests - 1) * sum(lengths[length] * powers[length + j] for length in range(k + 1 - j))
        for j in range(1, k + 1)
    ]
    waits = []
    for length in range(k + 1):
        wait = 0
        for j, gain in enumerate(others, 1):
            own = powers[length + j] if length + j <= k else 0.0
            if own + gain <= worth:
                break
            wait = j
        waits.append(wait)
    return waits
