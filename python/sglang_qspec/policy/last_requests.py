"""How much an output token of each request is worth for the end of the batch.

While requests wait, each output token counts the same: a request that ends makes room for another.
The same holds while another request comes for each one that ends. Otherwise the passes go on until
the last request of the batch ends. A request that ends before saves its rows in the
remaining passes; only tokens of those that end last save whole passes. Where rows cost much, drafts
for the others then take more time than they save: of a batch of equal answers, some end early, and
the rest runs in small batches. The last requests are those with the most passes to come at the pace
that drafts have given them so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEAR, UNSURE = 4, 0.1
"""Requests that end at most this number of passes before the last one count as the last, too, and
those that need at most this share of its passes less: how many they need is not known exactly."""
STEADY = 8
"""Tokens of an answer without drafts that are assumed beside those that tell its pace."""
CLIENT = 0.25
"""Share of a token's worth that is the same for all requests, because the token shortens the wait
of its own client. The rest of its worth is the time that it saves for the whole batch."""
PRIOR = 4.0
"""Weight, in requests, of the assumption that a share is a half."""
MEMORY = 64.0
"""Number of requests above which a count is halved, so that recent ones count more."""


@dataclass
class _Share:
    """Share of the requests for which something holds."""

    requests: float = 0.0
    """Number of requests."""
    holding: float = 0.0
    """Number of those for which it holds."""

    @property
    def value(self) -> float:
        """The share, from 0 to 1."""
        return (PRIOR / 2 + self.holding) / (PRIOR + self.requests)

    def observe(self, requests: int, *, holds: bool) -> None:
        """Count requests for which it holds, or does not."""
        self.requests += requests
        self.holding += requests * holds
        if self.requests > MEMORY:
            self.requests /= 2
            self.holding /= 2


class LastRequests:
    """Weighs the output tokens of a batch by what they save for its end.

    The end of a request is known if its answer reaches the limit of its length. Otherwise any
    request may be the last, and all tokens count the same.
    """

    def __init__(self) -> None:
        self._at_limit = _Share()
        """Share of the answers that reached their limit of tokens."""
        self._followed = _Share()
        """Share of the ends that another request followed while the batch still ran."""
        self._ends = 0
        """Ends since the last request came or the batch ended."""

    @property
    def certainty(self) -> float:
        """Probability that no other request comes, and that the last one is known."""
        return self._at_limit.value * (1.0 - self._followed.value)

    def arrive(self) -> None:
        """Note that a request has come."""
        self._followed.observe(self._ends, holds=True)
        self._ends = 0

    def end(self, *, at_limit: bool) -> None:
        """Note that a request has ended; `at_limit` says whether its answer reached the limit."""
        self._at_limit.observe(1, holds=at_limit)
        self._ends += 1

    def end_batch(self) -> None:
        """Note that no request is left. The last end is the end of the batch, and says nothing."""
        self._followed.observe(max(0, self._ends - 1), holds=False)
        self._ends = 0

    def weight(self, plain: float, half: float) -> float:
        """The part of a token's worth that only tokens of the last requests have, from 0 to 1.

        `plain` and `half` are the seconds of a plain pass over the batch and over half of it.
        """
        # The part of a pass's time that goes with its rows; the rest goes with the pass.
        rows = min(max(2.0 * (1.0 - half / plain), 0.0), 1.0)
        return self.certainty * (1.0 - CLIENT) * (1.0 - rows)

    def worth(
        self, rids: Sequence[str], passes: Mapping[str, float], weight: float
    ) -> NDArray[np.float64]:
        """The worth of a token of each request [bs], relative to that of a token while others wait.

        `passes` are those to come (`passes_left`), of all running requests. A request that it lacks
        may be the last one. `weight` is that of the batch.
        """
        most = max(passes.values(), default=0.0)
        near = most - max(NEAR, UNSURE * most)
        last = np.array([passes.get(rid, most) >= near for rid in rids], dtype=np.float64)
        share = len(rids) / max(1, int(last.sum()))
        worth: NDArray[np.float64] = 1.0 + weight * (share * last - 1.0)
        return worth


def passes_left(left: int, output: int, accepted: int) -> float:
    """Expected number of passes of a request with at most `left` output tokens to come.

    `output` is the number of output tokens so far, and `accepted` of them were drafts.
    """
    return left * (output - accepted + STEADY) / (output + STEADY)
