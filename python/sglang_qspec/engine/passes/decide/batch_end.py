"""What passes do for the end of a batch, which is the end of its last request.

While no request waits, the tokens of a request that ends before others save little
(`policy/last_requests.py`). So the decisions on drafts count how far passes bring the last request,
besides their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.policy import PassTimes


def weight(drafts: Drafts, times: PassTimes, requests: int) -> float:
    """`LastRequests.weight` of a batch of `requests`; 0 while others wait."""
    if requests < 2 or drafts.others_wait:
        return 0.0
    plain, half = (times.seconds(bs, 1) for bs in (requests, requests // 2))
    return drafts.last_requests.weight(plain, half)


def seconds_left(drafts: Drafts, times: PassTimes, requests: int) -> float:
    """Expected time until a batch of `requests` ends, in seconds; infinite while others wait."""
    if drafts.others_wait:
        return math.inf
    return max(drafts.passes_left().values(), default=math.inf) * times.seconds(requests, 1)


def progress(drafts: Drafts, rids: Sequence[str], accepted: Sequence[Sequence[int]]) -> int:
    """By how many tokens a committed pass brought the end of its last request nearer.

    `accepted` has the accepted nodes of each tree. A request without drafts may be the last one, so
    a pass with such a request counts as one without drafts.
    """
    left = drafts.tokens_left(rids)
    known = [tokens for tokens in left if tokens is not None]
    if len(known) < len(rids):
        return 1
    before = (tokens + 1 + len(nodes) for tokens, nodes in zip(known, accepted, strict=True))
    return max(before) - max(known)
