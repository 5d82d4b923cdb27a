"""How much an output token of each request is worth for the end of the batch.

While requests wait, each output token counts the same: a request that ends makes room for another.
The same holds while clients send a request for each answer that they get. Otherwise the passes go
on until the last request of the batch ends. A request that ends before saves its rows in the
remaining passes; only tokens of those that end last save whole passes. Where rows cost much, drafts
for the others then take more time than they save: of a batch of equal answers, some end early, and
the rest runs in small batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEAR = 4
"""Requests that end at most this number of tokens before the last one count as the last, too."""
CLIENT = 0.25
"""Share of a token's worth that is the same for all requests, because the token shortens the wait
of its own client. The rest of its worth is the time that it saves for the whole batch."""
PRIOR = 4.0
"""Weight, in requests, of the assumptions that half of all answers reach their limit, and that
another request comes after the end of every second one."""
MEMORY = 64.0
"""Number of requests above which a count is halved, so that recent ones count more."""


@dataclass
class _Share:
    """How often something was so."""

    seen: float = 0.0
    right: float = 0.0

    @property
    def value(self) -> float:
        """The share, which is a half at first."""
        return (PRIOR / 2 + self.right) / (PRIOR + self.seen)

    def observe(self, count: int, *, right: bool) -> None:
        self.seen += count
        self.right += count * right
        if self.seen > MEMORY:
            self.seen /= 2
            self.right /= 2


class LastRequests:
    """Weighs the output tokens of a batch by what they save for its end.

    The end of a request is known if its answer reaches the limit of its length. Otherwise any
    request may be the last, and all tokens count the same.
    """

    def __init__(self) -> None:
        self._at_limit = _Share()
        """Requests whose answer had reached its limit."""
        self._followed = _Share()
        """Requests after whose end another one came before the batch had ended."""
        self._ends = 0
        """Ends since the last request came or the batch ended."""

    @property
    def certainty(self) -> float:
        """Probability that no other request comes, and that the last one is known."""
        return self._at_limit.value * (1.0 - self._followed.value)

    def arrive(self) -> None:
        """Note that a request has come."""
        self._followed.observe(self._ends, right=True)
        self._ends = 0

    def end(self, *, at_limit: bool, others: bool) -> None:
        """Note that a request has ended; `others` says whether others go on."""
        self._at_limit.observe(1, right=at_limit)
        if others:
            self._ends += 1
            return
        self._followed.observe(self._ends, right=False)
        self._ends = 0

    def worth(self, leads: NDArray[np.int64], plain: float, half: float) -> NDArray[np.float64]:
        """The worth of a token of each request [bs], relative to that of a token while others wait.

        `leads` [bs] are the output tokens by which each request will end before the last one.
        `plain` and `half` are the seconds of a plain pass over the batch and over half of it.
        """
        bs = len(leads)
        # The part of a pass's time that goes with its rows; the rest goes with the pass.
        rows = min(max(2.0 * (1.0 - half / plain), 0.0), 1.0) if bs > 1 else 0.0
        last = (leads <= NEAR).astype(np.float64)
        share = bs / max(1, int(last.sum()))
        for_the_batch = rows + (1.0 - rows) * share * last
        known = CLIENT + (1.0 - CLIENT) * for_the_batch
        worth: NDArray[np.float64] = 1.0 + self.certainty * (known - 1.0)
        return worth
