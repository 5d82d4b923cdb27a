"""How many tokens the next pass verifies for each request.

SGLang's verification takes one width for the whole batch, so a wider tree for one request is
padding for all others. The width is the one at which the batch gains most tokens per time: a pass
of `bs` requests and width w takes 1 + row_cost * bs * (w - 1) times a plain decode step and yields,
for each request, the bonus token plus the estimated chances of its best w - 1 draft tokens.
"""

from __future__ import annotations

from sglang_qspec.errors import ConfigError
from sglang_qspec.trie import DraftTrees

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Widths that are used, so that kernels and buffers see few shapes."""


class WidthPolicy:
    """Chooses the width of a pass: 1 (plain decoding) to `max_width`.

    `row_cost` is what one more row adds to a decode step, as a share of it: on a CPU about 0.02, on
    a GPU far less.

    With `fixed` the answer is always `max_width`: captured CUDA graphs have one width.
    """

    def __init__(self, max_width: int, *, row_cost: float = 0.02, fixed: bool = False) -> None:
        if max_width < 1:
            raise ConfigError(f"max_width is {max_width}, but must be at least 1")
        if row_cost < 0.0:
            raise ConfigError(f"row_cost is {row_cost}, but must be at least 0")
        self.max_width = max_width
        self.row_cost = row_cost
        self.fixed = fixed
        self._steps = (*(width for width in LADDER if width < max_width), max_width)

    def width_for(self, trees: DraftTrees) -> int:
        """The common width of a pass over a batch, one tree a request."""
        if self.fixed:
            return self.max_width
        bs = len(trees)
        largest = int(trees.sizes.max(initial=1))
        tokens = trees.scores.sum(axis=0).cumsum().tolist()
        best, best_rate = 1, float(bs)
        for width in self._steps[1:]:
            rate = tokens[min(width, len(tokens)) - 1] / (1.0 + self.row_cost * bs * (width - 1))
            if rate > best_rate:
                best, best_rate = width, rate
            if width >= largest:
                break
        return best
