"""How much an output token of each request is worth for the end of the batch.

While requests wait, each output token counts the same: a request that ends makes room for another.
While none waits, the passes go on until the last request of the batch ends. A request that ends
before saves its rows in the remaining passes; only tokens of those that end last save whole passes.
Where rows cost much, drafts for the others then take more time than they save: of a batch of equal
answers, some end early, and the rest runs in small batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEAR = 4
"""Requests that are within this number of tokens of the one with the most count as the last."""
CLIENT = 0.25
"""Share of a token's worth that is the same for all requests, because the token shortens the wait
of its own client. The rest of its worth is the time that it saves for the whole batch."""
PRIOR = 4.0
"""Weight, in ended requests, of the assumption that half of all answers reach their limit."""
MEMORY = 64.0
"""Number of ended requests above which both counts are halved, so that recent ones count more."""


@dataclass
class LastRequests:
    """Weighs the output tokens of a batch by what they save for its end.

    The end of a request is known if its answer reaches the limit of its length. Otherwise any
    request may be the last, and all tokens count the same.
    """

    ended: float = 0.0
    """Number of ended requests."""
    at_limit: float = 0.0
    """Number of those whose answer had reached its limit."""

    def observe(self, *, at_limit: bool) -> None:
        """Record the end of a request."""
        self.ended += 1
        self.at_limit += at_limit
        if self.ended > MEMORY:
            self.ended /= 2
            self.at_limit /= 2

    @property
    def certainty(self) -> float:
        """Share of the answers that are expected to reach their limit."""
        return (PRIOR / 2 + self.at_limit) / (PRIOR + self.ended)

    def worth(self, remaining: NDArray[np.int64], plain: float, half: float) -> NDArray[np.float64]:
        """The worth of a token of each request [bs], relative to that of a token while others wait.

        `remaining` [bs] are the output tokens that each request may still give. `plain` and `half`
        are the seconds of a plain pass over the batch and over half of it.
        """
        bs = len(remaining)
        # The part of a pass's time that goes with its rows; the rest goes with the pass.
        rows = min(max(2.0 * (1.0 - half / plain), 0.0), 1.0) if bs > 1 else 0.0
        last = remaining >= remaining.max(initial=0) - NEAR
        share = bs / max(1, int(last.sum()))
        for_the_batch = rows + (1.0 - rows) * share * last
        known = CLIENT + (1.0 - CLIENT) * for_the_batch
        worth: NDArray[np.float64] = 1.0 + self.certainty * (known - 1.0)
        return worth
