"""How many tokens the next pass verifies for each request.

SGLang's verification takes one width for the whole batch, so a wider tree for one request is
padding for all others. The width is the one at which the batch gains most tokens per time: a pass
of `bs` requests and width w has bs * w rows, whose cost `PassCost` estimates, and it yields, for
each request, the bonus token plus the estimated chances of its best w - 1 draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.errors import ConfigError
from sglang_qspec.trie import DraftTrees

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Widths that are used, so that kernels and buffers see few shapes."""
MEMORY = 0.05
"""Weight of the latest pass in what passes take."""
FIRST_UNIT = 0.03
"""Seconds that a pass is taken for before any was seen."""


@dataclass(frozen=True)
class PassCost:
    """The time of a pass by its rows (tokens), over that of a pass without any.

    A pass reads all weights whatever its rows, and up to some number of rows that is what takes
    its time; from there on every row is arithmetic. The figures are those of the demo target in
    bfloat16 on one core of an AMD EPYC, where matrix products take as long for 8 rows as for one
    (`benchmark.bench_linear`, `benchmark.bench_cpu`).
    """

    cheap_rows: int = 8
    cheap_row: float = 0.01
    """What a row adds, up to `cheap_rows`."""
    row: float = 0.035
    """What a row adds from there on."""

    def __post_init__(self) -> None:
        for name in ("cheap_rows", "cheap_row", "row"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 0")

    def of(self, rows: int) -> float:
        """Of a pass with so many rows."""
        cheap = min(rows, self.cheap_rows)
        return 1.0 + self.cheap_row * cheap + self.row * (rows - cheap)


@dataclass(frozen=True)
class Choice:
    """The width of a pass, and what it is expected to yield."""

    width: int
    rate: float
    """Tokens per second."""


class WidthPolicy:
    """Chooses the width of a pass: 1 (plain decoding) to `max_width`.

    With `fixed` the answer is always `max_width`: captured CUDA graphs have one width.
    """

    def __init__(self, max_width: int, *, cost: PassCost = PassCost(), fixed: bool = False) -> None:
        if max_width < 1:
            raise ConfigError(f"max_width is {max_width}, but must be at least 1")
        self.max_width = max_width
        self.cost = cost
        self.fixed = fixed
        self._steps = (*(width for width in LADDER if width < max_width), max_width)
        self._unit: float | None = None

    def choose(self, trees: DraftTrees) -> Choice:
        """The common width of a pass over a batch, one tree a request."""
        bs = len(trees)
        unit = self._unit or FIRST_UNIT
        tokens = trees.scores.sum(axis=0).cumsum().tolist()
        if self.fixed:
            return Choice(self.max_width, tokens[-1] / self.cost.of(bs * self.max_width) / unit)
        largest = int(trees.sizes.max(initial=1))
        best, best_rate = 1, bs / self.cost.of(bs)
        for width in self._steps[1:]:
            rate = tokens[min(width, len(tokens)) - 1] / self.cost.of(bs * width)
            if rate > best_rate:
                best, best_rate = width, rate
            if width >= largest:
                break
        return Choice(best, best_rate / unit)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long, from the end of the pass before it."""
        unit = seconds / self.cost.of(rows)
        if self._unit is None:
            self._unit = unit
        # A prompt's pass in between, or a machine that was busy, is no news about passes.
        unit = min(unit, 2 * self._unit)
        self._unit += MEMORY * (unit - self._unit)
