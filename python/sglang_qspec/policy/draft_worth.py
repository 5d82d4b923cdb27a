"""What the next token of a draft is worth to the target, learnt from the tokens that it commits.

A draft token saves the target a token of a pass if it is right, if it comes before the target has
gone past it, and if nothing else has drafted it. How often that happens depends on what the token
is for, and on its position: a step draft loses against a fast target in its first tokens, and
against doubtful texts in its last ones. `DraftWorth` counts it, and so decides where a sidecar
spends its next pass.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a draft token is for."""

    STEP = 0
    """Continues the committed output of a served request."""
    FIRST = 1
    """Belongs to the likeliest completion of a waiting prompt."""
    OTHER = 2
    """Belongs to another completion of a waiting prompt."""
    SERVED = 3
    """Continues a completion of a prompt that is already served."""


DEEPEST = 23
"""Position from which all tokens count together."""
MEMORY = 200.0
"""Number of judged tokens of one purpose and position that count at most."""
DOUBT = 4.0
"""Weight of what is assumed of a purpose and position, in judged tokens."""
KEPT = 0.9995
"""Share of what was learnt that each pass of the sidecar keeps. So a purpose that was worth nothing
is tried again, in some percent of the passes."""
SOONER = 2.0
"""Factor by which a step draft counts more than other drafts of the same chance: it is worth
something only now, and they later too."""
ASSUMED = {
    Purpose.STEP: (0.9, 0.9),
    Purpose.FIRST: (0.8, 0.9),
    Purpose.OTHER: (0.2, 0.9),
    Purpose.SERVED: (0.02, 0.9),
}
"""Chance of the first token before any was judged, and factor for each further one.

While few tokens of a position were judged, its chance is near that of the position before it, times
this factor.
"""
REFRESH = 8
"""Number of passes after which `value` follows what was judged meanwhile."""


class DraftWorth:
    """Chances that draft tokens save tokens of passes, by purpose and position.

    The position of a token is its distance from the committed output when it is drafted; for a
    waiting prompt that is its place in the completion.
    """

    def __init__(self) -> None:
        self._first = np.array([ASSUMED[purpose][0] for purpose in Purpose])
        self._factor = np.array([ASSUMED[purpose][1] for purpose in Purpose])
        self._judged = np.zeros((len(Purpose), DEEPEST + 1))
        self._saved = np.zeros_like(self._judged)
        self._passes = 0
        self._values: list[list[float]] = []
        """What `value` returns; empty if it is outdated."""

    def judge(self, purpose: Purpose, position: int, *, saved: bool) -> None:
        """Record whether a token saved one of a pass."""
        place = (purpose, min(position, DEEPEST))
        if self._judged[place] >= MEMORY:
            self._judged[place] *= 0.5
            self._saved[place] *= 0.5
        self._judged[place] += 1.0
        self._saved[place] += saved

    def fade(self) -> None:
        """Forget a part of what was learnt, once for each pass of the sidecar."""
        self._judged *= KEPT
        self._saved *= KEPT
        self._passes += 1
        if self._passes % REFRESH == 0:
            self._values = []

    @property
    def chances(self) -> NDArray[np.float64]:
        """Chance that a token saves one of a pass, [purposes, positions]."""
        found = np.empty_like(self._judged)
        expected = self._first
        for position in range(DEEPEST + 1):
            saved, judged = self._saved[:, position], self._judged[:, position]
            found[:, position] = (saved + DOUBT * expected) / (judged + DOUBT)
            expected = self._factor * found[:, position]
        return found

    def value(self, purpose: Purpose, position: int) -> float:
        """Saved tokens for each token that is drafted from this position on, as far as it pays.

        A token may be worth nothing by itself, and yet be needed for those after it. The value of
        step drafts is multiplied by SOONER.
        """
        if not self._values:
            found = _best_means(self.chances)
            found[Purpose.STEP] *= SOONER
            self._values = found.tolist()
        return self._values[purpose][min(position, DEEPEST)]


def _best_means(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest mean of `chances` [n, m] from each position to any later one, [n, m]."""
    count = chances.shape[1]
    padded = np.concatenate([chances, np.repeat(chances[:, -1:], count, axis=1)], axis=1)
    sums = np.concatenate([np.zeros((len(chances), 1)), padded.cumsum(axis=1)], axis=1)
    lengths = np.arange(1, count + 1)
    starts = np.arange(count)
    means = (sums[:, starts[:, None] + lengths] - sums[:, starts, None]) / lengths
    found: NDArray[np.float64] = means.max(axis=2)
    return found
