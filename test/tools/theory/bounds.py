"""Upper bounds on the gain of overlapping drafting with verification, for any acceptance rate.

Formulas of docs/theory.md that no command needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

NEWTON_STEPS = 60


class Halving(NamedTuple):
    """Throughput of two alternating halves, relative to drafting and verifying in turn."""

    doubled: float
    """Two halves of m requests each, relative to m requests in turn, as in the paper; at most 2."""
    same: float
    """Two halves of m requests each, relative to the same 2m requests in turn."""


def bound(verify: float, draft: float) -> float:
    """Return (V + D) / max(V, D): the gain if the shorter time is hidden; 2 if both are equal."""
    longer = max(verify, draft)
    return (verify + draft) / longer if longer > 0.0 else 1.0


def halves_over_sequential(
    m: int, verify_seconds: Callable[[int], float], draft_seconds: Callable[[int], float]
) -> Halving:
    """The gain of `halves` with m requests in each half, at one width.

    Both halves have their pass within 2 max(V(m), D(m)). If V and D do not depend on b, `same` is
    half of `doubled`: a whole batch takes the same time as its half, and halves gain nothing.
    """
    longer = max(verify_seconds(m), draft_seconds(m))
    in_turn = verify_seconds(2 * m) + draft_seconds(2 * m)
    return Halving(bound(verify_seconds(m), draft_seconds(m)), in_turn / (2 * longer))


def sd_over_psd(alpha_v: float) -> float:
    """T_SD / T_PSD at the best drafting time of each (MineDraft, arXiv 2603.18016).

    Theorem 1 assumes that a draft succeeds with probability f(t) = 1 - exp(-alpha t) after a
    drafting time t. A success takes the minimum over t of (V + t) / f(t) without overlap, and of
    max(V, t) / f(t) with overlap. Let v = alpha V and x = alpha t. The first minimum is at the
    solution of e^x = 1 + x + v and equals e^x / alpha. The second is at t = V. So the ratio depends
    on v alone.
    """
    x = math.log1p(alpha_v) + 1.0  # above the root, so Newton's method converges from above
    for _ in range(NEWTON_STEPS):
        over = math.expm1(x) - x - alpha_v
        if over <= 1e-14 * (1.0 + alpha_v):
            break
        x -= over / math.expm1(x)
    return math.exp(x) * -math.expm1(-alpha_v) / alpha_v
