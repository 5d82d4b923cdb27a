"""Agreement of a draft model with a target along answers of the target.

`agreed` has a list of booleans for each answer: whether the draft model chose the target's token at
each position, given the target's tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence


def share(agreed: Sequence[Sequence[bool]]) -> float:
    """Share of the positions of all answers at which both chose the same token; 0 without any."""
    positions = sum(map(len, agreed))
    return sum(map(sum, agreed)) / positions if positions else 0.0


def tokens_per_pass(agreed: Sequence[Sequence[bool]], k: int) -> float:
    """Tokens of a pass that verifies the next `k` draft tokens, averaged over all answers.

    Each pass accepts draft tokens up to the first that differs, and adds a token of the target.
    An accepted draft token is the target's, so the draft model reads the target's tokens in every
    pass, and the answers alone show how each pass would end.
    """
    passes = 0
    for answer in agreed:
        place = 0
        while place < len(answer):
            accepted = 0
            while accepted < k and place + accepted < len(answer) and answer[place + accepted]:
                accepted += 1
            place += accepted + 1
            passes += 1
    return sum(map(len, agreed)) / passes if passes else 1.0
