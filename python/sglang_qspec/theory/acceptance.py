"""Expected tokens of one request in one pass."""

from __future__ import annotations

HALVINGS = 60
"""Of the interval in which an agreement is sought; more than a float has bits."""


def expected_tokens(alpha: float, k: int) -> float:
    """Of a pass that verifies k draft tokens: those accepted and the one the target adds.

    (1 - alpha^(k+1)) / (1 - alpha), from 1 to k + 1: equation 1 of Leviathan et al. 2023
    (arXiv 2211.17192). Summed as 1 + alpha + ... + alpha^k, which is also right at alpha = 1.
    """
    total = power = 1.0
    for _ in range(k):
        power *= alpha
        total += power
    return total


def agreement(tokens: float, k: int) -> float:
    """The alpha at which a pass over k draft tokens is expected to yield so many.

    The inverse of `expected_tokens`; 0 or 1 for what no alpha yields.
    """
    low, high = 0.0, 1.0
    if k < 1 or tokens <= 1.0:
        return low
    if tokens >= k + 1:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if expected_tokens(middle, k) < tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def hit_share(alpha: float, k: int, again: float) -> float:
    """The share of passes that have a draft from the queue to verify, in the long run.

    A text that follows a completion goes on following it with chance alpha^(k+1) a pass. One that
    has left it finds a place in another completion, or a later one in the same, with chance
    `again` at each pass, the next one included.
    """
    leaves = (1.0 - alpha ** (k + 1)) * (1.0 - again)
    return again / (again + leaves) if again > 0.0 else float(leaves == 0.0)


def queue_tokens(alpha: float, k: int, again: float) -> float:
    """Expected tokens of a pass under queue speculation, with or without a draft to verify."""
    return 1.0 + hit_share(alpha, k, again) * (expected_tokens(alpha, k) - 1.0)
