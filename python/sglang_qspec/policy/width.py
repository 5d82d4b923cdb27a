"""How many tokens the next pass verifies for each request.

SGLang's verification takes one width for the whole batch, so a wider tree for one request is
padding for all others. The width is the one at which the batch gains most tokens per second: a pass
of `bs` requests and width w takes as long as `PassTimes` knows, and it yields, for each request,
the bonus token plus the estimated chances of its best w - 1 draft tokens. So one more row of each
request is bought where what all of them gain by it together is worth its time. A plain pass is made
now and then in any case, so that it is known what drafts are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.pass_times import PassTimes

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Widths that are used, so that kernels and buffers see few shapes."""
MARGIN = 1.02
"""How many times as many tokens per second as plain decoding a wider pass must be expected to give:
the best of several estimates is more likely too high than too low."""


@dataclass(frozen=True)
class Choice:
    """The width of a pass, and what it is expected to yield and to take."""

    width: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class WidthPolicy:
    """Chooses the width of a pass: 1 (plain decoding) to `max_width`.

    With `fixed` the answer is always `max_width`: captured CUDA graphs have one width.
    """

    def __init__(
        self, max_width: int, *, times: PassTimes | None = None, fixed: bool = False
    ) -> None:
        self.times = times or PassTimes()
        self.fixed = fixed
        self.limit(max_width)

    def limit(self, max_width: int) -> None:
        """Passes are to be at most so wide from now on."""
        if max_width < 1:
            raise ConfigError(f"max_width is {max_width}, but must be at least 1")
        self.max_width = max_width
        self._steps = (*(width for width in LADDER if width < max_width), max_width)

    def choose(
        self, scores: NDArray[np.float32], factors: NDArray[np.float64] | None = None
    ) -> Choice:
        """The common width of a pass over a batch.

        `scores` [bs, D] are those of the trees' nodes, the roots first and then the best, and 0
        where there is none; `factors` [bs] say how much of each request's is believed, by default
        all.
        """
        bs = len(scores)
        if factors is None:
            factors = np.ones(bs)
        gains = factors @ scores
        gains[:1] = bs  # the roots, which are no drafts
        tokens = gains.cumsum().tolist()
        if self.fixed:
            return self._pass(bs, self.max_width, tokens)
        plain = self._pass(bs, 1, tokens)
        best, rate = plain, MARGIN * plain.rate
        largest = np.count_nonzero(gains)
        for width in self._steps[1:]:
            found = self._pass(bs, width, tokens)
            if found.rate > rate:
                best, rate = found, found.rate
            if width >= largest:
                break
        return plain if self.times.plain_is_due(bs) else best

    def _pass(self, bs: int, width: int, tokens: Sequence[float]) -> Choice:
        """`tokens` are what passes of width 1 and more yield."""
        expected = tokens[min(width, len(tokens)) - 1] if tokens else 0.0
        return Choice(width, expected, self.times.seconds(bs, width))
