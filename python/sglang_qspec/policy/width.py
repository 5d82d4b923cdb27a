"""Chooses how many tokens the next pass verifies for each request, if all have one width.

A wider tree for one request is then padding for the others; `row_budget` chooses without padding.
`WidthPolicy` chooses the width with the most expected tokens per second. A pass over `bs` requests
at width w takes the seconds that `PassTimes` predicts. For each request it yields the bonus token
and the sum of the scores of its best w - 1 draft tokens. A plain pass runs periodically, because
the policy compares wider passes with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.trie import DraftTrees

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Allowed widths. The list is short, so that kernels and buffers see few shapes."""
PASS_ROWS = 768
"""Maximum number of rows of a pass, if its requests are fewer. A row of logits takes half a MB with
128k tokens, so a pass takes about 400 MB for them, and some copies of these while it samples."""
MARGIN = 1.02
"""Factor by which a wider pass must be predicted to beat plain decoding, in tokens per second. It
is above 1 because the highest of several estimates tends to be too high."""


@dataclass(frozen=True)
class Choice:
    """The width of a pass, with its expected tokens and seconds."""

    width: int
    """Number of tokens that the pass verifies for each request."""
    tokens: float
    """Expected output tokens of the whole batch, bonus tokens included."""
    seconds: float
    """Predicted time of the pass, in seconds."""

    @property
    def rate(self) -> float:
        """Expected output tokens per second of the whole batch."""
        return self.tokens / self.seconds

    def cut(self, trees: DraftTrees) -> DraftTrees:
        """The trees of the pass, cut from wider ones."""
        return trees.best(self.width)


class WidthPolicy:
    """Chooses the width of a pass: 1 (plain decoding) to `max_width`, at most PASS_ROWS rows."""

    def __init__(
        self,
        max_width: int,
        *,
        times: PassTimes | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        self.times = times or PassTimes()
        self.widths = widths
        """Allowed widths in rising order, such as those with CUDA graphs; None for LADDER. Without
        1 among them no pass is plain. Those above `max_width` are not used, except the first."""
        self.limit(max_width)

    def limit(self, max_width: int) -> None:
        """Set the maximum width of later passes. Raises ConfigError if it is below 1."""
        if max_width < 1:
            raise ConfigError(f"max_width is {max_width}, but must be at least 1")
        self.max_width = max_width
        self._steps = (*(width for width in LADDER if width < max_width), max_width)

    def choose(
        self,
        scores: NDArray[np.float32],
        factors: NDArray[np.float64] | None = None,
        *,
        longest: float = math.inf,
    ) -> Choice:
        """The common width of a pass over a batch.

        `scores` [bs, D] are the scores of the trees' nodes: the root first, then in falling order,
        0 for padding. `factors` [bs] multiply each request's scores (`Credit.factor`), by default
        with 1. A pass with drafts is predicted to take at most `longest` times as long as one
        without (`Precedence`), unless all allowed widths take longer.
        """
        bs = len(scores)
        if factors is None:
            factors = np.ones(bs)
        gains = factors @ scores
        gains[:1] = bs  # column 0 holds the roots, which yield the bonus tokens
        tokens = gains.cumsum().tolist()
        first, *wider = self._allowed(bs)
        narrowest = self._pass(bs, first, tokens)
        best, rate = narrowest, narrowest.rate * (MARGIN if first == 1 else 1.0)
        largest, most = np.count_nonzero(gains), longest * self.times.seconds(bs, 1)
        for width in wider:
            found = self._pass(bs, width, tokens)
            if found.rate > rate and found.seconds <= most:
                best, rate = found, found.rate
            if width >= largest:
                break
        return narrowest if first == 1 and self.times.plain_is_due(bs) else best

    def _allowed(self, bs: int) -> Sequence[int]:
        """The widths to choose from; at least one."""
        widths = self._steps if self.widths is None else self.widths
        most = min(self.max_width, most_width(bs))
        return [width for width in widths if width <= most] or widths[:1]

    def _pass(self, bs: int, width: int, tokens: Sequence[float]) -> Choice:
        """The pass of this width; `tokens[w - 1]` is the expected yield at width w."""
        expected = tokens[min(width, len(tokens)) - 1] if tokens else 0.0
        return Choice(width, expected, self.times.seconds(bs, width))


def most_width(requests: int) -> int:
    """The largest width of a pass over a batch of this size, at least 1."""
    return max(1, PASS_ROWS // max(1, requests))
