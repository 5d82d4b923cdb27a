"""Do counts agree with a distribution?"""

from __future__ import annotations

from torch import Tensor


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Per degree of freedom, about 1 if they do; impossible outcomes must not occur at all."""
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    hoped = expected[possible] * counts.sum()
    freedom = max(int(possible.sum()) - 1, 1)
    return float(((counts[possible] - hoped) ** 2 / hoped).sum()) / freedom
