"""Expected number of tokens of one request in one pass."""

from __future__ import annotations

HALVINGS = 60
"""Number of bisection steps of `agreement`; a float has fewer bits."""


def expected_tokens(alpha: float, k: int) -> float:
    """Expected tokens of a pass over k draft tokens: the accepted ones and the bonus token.

    (1 - alpha^(k+1)) / (1 - alpha), from 1 to k + 1: equation 1 of Leviathan et al. 2023
    (arXiv 2211.17192). Summed as 1 + alpha + ... + alpha^k, which is also right at alpha = 1.
    """
    total = power = 1.0
    for _ in range(k):
        power *= alpha
        total += power
    return total


def agreement(tokens: float, k: int) -> float:
    """Return the alpha at which `expected_tokens` of a pass over k draft tokens is `tokens`.

    Returns 0 or 1 if `tokens` is too low or too high for any alpha.
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
    """Return the long-run share of passes that have a queue draft to verify.

    A text that follows a completion still follows it after a pass with probability alpha^(k+1). A
    text that has diverged matches a completion again with probability `again` at each pass, the
    next one included.
    """
    leaves = (1.0 - alpha ** (k + 1)) * (1.0 - again)
    return again / (again + leaves) if again > 0.0 else float(leaves == 0.0)


def queue_tokens(alpha: float, k: int, again: float) -> float:
    """Expected tokens of a pass under queue speculation, averaged over all passes."""
    return 1.0 + hit_share(alpha, k, again) * (expected_tokens(alpha, k) - 1.0)
