"""Agreement of a draft model with a target along answers of the target.

`agreed` has a list of booleans for each answer: whether the draft model chose the target's token at
each position, given the target's tokens before it. A file of tables has a text such as "1101" for
each answer (`tables.Agreed`), which `judged` reads off the traces of a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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


def judged(traces: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[str], float, float]:
    """For each answer, which tokens the draft model chose too, as `tables.Agreed`.

    Also the share of passes with drafts, and the mean depth of a tree, in these answers. Where a
    pass has accepted a whole draft, the draft does not show whether the next token would have been
    right. This token is left out. Answers without drafts are left out too.
    """
    answers: list[str] = []
    drafted = depth = passes = 0
    for trace in traces:
        found = ""
        if not any(each["tree"]["parents"] for each in trace):
            continue
        for each in trace:
            passes += 1
            parents = each["tree"]["parents"]
            if not parents:
                continue
            right = [place for place, good in enumerate(each["tree"]["accepted"]) if good]
            drafted += 1
            depth += _depth(parents)
            found += "1" * len(right)
            found += "0" * ((right[-1] if right else -1) in parents)
        answers.append(found)
    return answers, drafted / max(1, passes), depth / max(1, drafted)


def _depth(parents: Sequence[int]) -> int:
    """Number of tokens on the longest path of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def matching_again(answers: Sequence[str], share: float, depth: float) -> float:
    """The probability `again` at which theory's share of passes with a draft is `share`.

    It solves docs/theory.md's s = r / (r + (1 - a^(k+1)) (1 - r)) for r.
    """
    text = "".join(answers)
    alpha = text.count("1") / len(text)
    leaves = 1.0 - alpha ** (depth + 1)
    again = share * leaves / max(1e-9, 1.0 - share + share * leaves)
    return min(1.0, max(0.0, again))
