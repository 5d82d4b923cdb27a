"""Chooses how many draft tokens of each request the pass over its prompt verifies.

A draft token that is right there needs no decode pass, so it saves the time of a token in decode
passes. It costs the time of a row in a pass over prompts. So a draft token is worth its row if its
chance times the time of a token exceeds the time of a row. On a GPU a row costs little, because the
pass reads all weights anyway. On a CPU each row adds arithmetic. Passes over prompts are measured
where the host waits for them, which is on CPUs; elsewhere `PassCost` gives the time of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.policy.width import MARGIN

FEWEST_ROWS = 32
"""Rows of a pass over prompts from which its time tells what a row costs."""
WEIGHT = 0.2
"""Weight of the latest pass over prompts in the time of a row."""
RECENT = 0.05
"""Weight of the latest decode pass in the averages of decode passes."""


class PrefillRows:
    """Learns what a row costs in a pass over prompts, and spends rows on drafts that are worth it.

    `times` predicts the decode passes.
    """

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._measured: float | None = None
        """Moving average of the seconds of a row; None before the first measured pass."""
        self._width = self._tokens = 1.0
        """Rows and output tokens of a request in a decode pass: moving averages."""

    @property
    def row_seconds(self) -> float:
        """Seconds that one more row adds to a pass over prompts."""
        if self._measured is not None:
            return self._measured
        return self._unit * self._times.cost.row

    @property
    def _unit(self) -> float:
        """Predicted seconds of a pass without rows."""
        return self._times.seconds(1, 1) / self._times.cost.of(1)

    def observe(self, rows: int, seconds: float) -> None:
        """Record a pass over `rows` tokens of prompts and drafts that took `seconds`."""
        if rows < FEWEST_ROWS:
            return
        row = max(0.0, seconds - self._unit) / rows
        if self._measured is None:
            self._measured = row
        # A cap limits the effect of a load peak.
        self._measured += WEIGHT * (min(row, 2 * self._measured) - self._measured)

    def observe_decode(self, requests: int, rows: int, tokens: int) -> None:
        """Record the rows of a decode pass over `requests`, and the output tokens that it gave."""
        self._width += RECENT * (rows / requests - self._width)
        self._tokens += RECENT * (tokens / requests - self._tokens)

    def token_seconds(self, running: int) -> float:
        """Seconds of an output token if `running` requests, at least 1, decode together."""
        return self._times.seconds(running, self._width) / (running * self._tokens)

    def least_chance(self, running: int) -> float:
        """The chance that a draft token needs if `running` requests decode together."""
        return MARGIN * self.row_seconds / self.token_seconds(running)

    def lengths(
        self,
        scores: NDArray[np.floating[Any]],
        rooms: NDArray[np.int64],
        least: float,
    ) -> NDArray[np.int64]:
        """The number of tokens of each chain that the pass verifies, the root included: [bs].

        `scores` [bs, D] are the chances of the chains' nodes, in falling order and 0 for padding.
        A draft token needs the chance `least`. `rooms` [bs] is the most draft tokens of each
        request.
        """
        drafts = scores[:, 1:]
        worth = ((drafts > 0) & (drafts >= least)).sum(axis=1)
        lengths: NDArray[np.int64] = 1 + np.minimum(worth, rooms)
        return lengths
