"""Predicted time of a target pass, learnt from the passes that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.row_cost import RowCost

COMMON = 0.1
"""Weight of the latest pass in the pace that all sizes share."""
OWN = 0.02
"""Weight of the latest pass in the level of its size; higher for the first passes of a size."""
SETTLED = 20
"""Passes of a size after which further ones also update the shared pace."""
NEWS = 0.0005
"""Weight with which a pass moves the levels of other widths towards its own. A width that is no
longer used therefore does not keep a bad level forever."""
FIRST_GAP, LONGEST_GAP = 4, 256
"""Number of wider passes after which a plain pass is due: FIRST_GAP at first, then twice the last
number, up to LONGEST_GAP. The policy compares wider passes with plain ones."""
ALONE = -1
"""Number of cores that stands for a shared device on which the sidecar does not draft."""
KNOWN = 4
"""Number of measured passes from which the times on a number of cores are known."""
FIRST_UNIT = 0.03
"""Predicted seconds of a relative cost of 1, before any pass was measured."""


@dataclass(frozen=True)
class PassCost:
    """Relative time of a pass by its rows (tokens of all requests); a pass without rows costs 1.

    Every pass reads all weights. Up to `cheap_rows` that read dominates, and beyond it each row
    adds arithmetic. The defaults are measured with the demo target in bfloat16 on one core of an
    AMD EPYC, where a matrix product takes as long for 8 rows as for one (docs/results.md).
    """

    cheap_rows: int = 8
    """Number of rows up to which each row costs `cheap_row`."""
    cheap_row: float = 0.01
    """Relative cost of each of the first `cheap_rows` rows."""
    row: float = 0.035
    """Relative cost of each further row."""

    def __post_init__(self) -> None:
        for name in ("cheap_rows", "cheap_row", "row"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 0")

    def of(self, rows: float) -> float:
        """The relative time of a pass with this number of rows."""
        cheap = min(rows, self.cheap_rows)
        return 1.0 + self.cheap_row * cheap + self.row * (rows - cheap)


GPU_COST = PassCost(cheap_rows=192, cheap_row=0.0005, row=0.003)
"""Relative time of a pass on a GPU by its number of rows.

It is a prediction for an 8B model in bfloat16 on an H100. A pass with 512 rows takes about twice as
long as a pass with one row. Up to about 200 rows, reading the weights takes longer than the matrix
products.
"""


class _Size(NamedTuple):
    """Passes that share a level."""

    requests: int
    """Binary order of magnitude of the batch size."""
    width: int
    """Average width in half octaves; 0 for plain passes. Two widths of `LADDER` always differ."""
    context: int
    """Average context length in powers of four."""

    @property
    def rows(self) -> float:
        """Rows of a typical pass of this size."""
        return 0.75 * 2**self.requests * 2 ** (self.width / 2)


@dataclass
class _Level:
    """Scale of `PassCost` for the passes of one size."""

    unit: float
    """Seconds for a relative cost of 1, before `_pace` is applied."""
    seen: int = 0
    """Number of measured passes."""


@dataclass
class _Turn:
    """When the next plain pass is due at one number of cores, batch size and context length."""

    wider: int = 0
    """Passes since the last plain one."""
    gap: int = FIRST_GAP
    """Value of `wider` at which a plain pass is due."""


class PassTimes:
    """Predicts the seconds of a pass from its batch size and its width in tokens per request.

    The width is the average over the requests, so width times requests are the rows of the pass.
    `cost` gives the shape within a size (`_Size`), and measured passes give each size its level. A
    size without measurements takes the level of the nearest size, corrected by what was learnt of
    the cost of rows (`RowCost`). The longer the context, the more a row costs, so each magnitude of
    the context has its own levels; the first of them scale those of other contexts until they are
    measured themselves. A shared processor slows down passes of all sizes. The pace, a common
    factor that every pass updates quickly, follows such changes, so the levels of unused sizes stay
    valid relative to the others.
    """

    def __init__(self, cost: PassCost = PassCost()) -> None:
        self.cost = cost
        self._levels: dict[_Size, _Level] = {}
        self._others: dict[int, dict[_Size, _Level]] = {0: self._levels}
        """Levels by the number of cores of the target; `_levels` are those of the present one."""
        self._row_cost = RowCost()
        self._row_costs = {0: self._row_cost}
        """Costs of rows by the number of cores; `_row_cost` is that of the present one."""
        self._units: dict[_Size, float] = {}
        """Units of sizes without a level, since the latest pass."""
        self._pace = 1.0
        """Factor on all levels."""
        self._cores = 0
        """Number of cores that `_levels` belong to."""
        self._turns: dict[tuple[int, int, int], _Turn] = {}
        """By number of cores, order of magnitude of the batch size, and context."""
        self._context = 0
        """Average context length of the present batch in powers of four."""

    def enter(self, context: float) -> None:
        """Let all further calls be about passes with this average context length in tokens."""
        self._context = round(log2(max(1.0, context)) / 2)

    def enter_cores(self, count: int) -> None:
        """Let all further calls be about passes on this number of cores; 0 at first.

        A target that shares its device with a sidecar has the number 0 while the sidecar drafts for
        running requests, and ALONE while it does not.
        """
        self._cores = count
        self._levels = self._others.setdefault(count, {})
        self._row_cost = self._row_costs.setdefault(count, RowCost())
        self._units.clear()

    def slowdown(self, requests: int) -> float | None:
        """Time of a plain pass while the sidecar drafts over its time while it does not.

        None until passes over this order of magnitude of requests were measured in both ways.
        """
        size = self._size(requests, 1)
        busy, idle = (self._others.get(cores, {}).get(size) for cores in (0, ALONE))
        return busy.unit / idle.unit if busy and idle and busy.seen and idle.seen else None

    def seconds(self, requests: int, width: float) -> float:
        """Predicted seconds of a pass over `width` tokens of each request on average."""
        unit = self._unit(self._size(requests, width)) * self._pace if self._levels else FIRST_UNIT
        return self.cost.of(requests * width) * unit

    def on(self, cores: int, near: int | None = None) -> Callable[[int, float], float] | None:
        """`seconds` on this number of cores; None before KNOWN passes were measured on it.

        With `near`, a batch size, only passes over batches of about that size count. What cores
        are worth for other sizes says little: a pass over one request reads the weights, whatever
        computes, and the arithmetic of a pass over many needs all cores.
        """
        levels = self._others.get(cores, {})
        wanted = None if near is None else near.bit_length()
        counted = (
            level.seen
            for size, level in levels.items()
            if wanted is None or abs(size.requests - wanted) <= 1
        )
        if sum(counted) < KNOWN:
            return None

        def seconds(requests: int, width: float) -> float:
            present = self._cores, self._levels, self._row_cost, self._units
            self._cores, self._levels = cores, self._others[cores]
            self._row_cost, self._units = self._row_costs[cores], {}
            try:
                return self.seconds(requests, width)
            finally:
                self._cores, self._levels, self._row_cost, self._units = present

        return seconds

    def observe(self, requests: int, width: float, seconds: float) -> None:
        """Record the measured seconds of a pass over `width` tokens of each request on average."""
        key = self._size(requests, width)
        turn = self._turns.setdefault((self._cores, key.requests, key.context), _Turn())
        turn.wider += 1
        if width == 1:
            turn.wider, turn.gap = 0, min(2 * turn.gap, LONGEST_GAP)
        self._units.clear()
        if not self._levels:
            self._levels[key] = _Level(seconds / self.cost.of(requests * width), 1)
            return
        level = self._levels.get(key)
        if level is None:
            # The first pass of a size allocates memory that later passes reuse: ignore its time.
            self._levels[key] = _Level(self._unit(key))
            return
        # A cap limits the effect of a prefill in between or of a load peak.
        predicted = self.seconds(requests, width)
        error = min(seconds / predicted, 1.5) - 1.0
        paced = (1.0 + error) * predicted / self._pace
        self._row_cost.observe(self.cost.of(requests * width) - 1.0, paced)
        level.seen += 1
        level.unit *= 1.0 + max(OWN, 1 / level.seen) * error
        if level.seen > SETTLED:
            self._pace *= 1.0 + COMMON * error
        for other, theirs in self._levels.items():
            if other[::2] == key[::2] and other.width != key.width:
                news = level.unit * self._correction(key, other)
                theirs.unit += NEWS * (news - theirs.unit)

    def plain_is_due(self, requests: int) -> bool:
        """Whether a plain pass is due at this batch size, after enough wider ones."""
        turn = self._turns.get((self._cores, requests.bit_length(), self._context))
        return turn is not None and turn.wider >= turn.gap

    def _size(self, requests: int, width: float) -> _Size:
        steps = 0 if width == 1 else max(1, round(2 * log2(width)))
        return _Size(requests.bit_length(), steps, self._context)

    def _unit(self, size: _Size) -> float:
        """Seconds for a relative cost of 1 at this size, before `_pace` is applied.

        A size without measurements takes the level of the nearest one: by requests, then by width,
        then by context. A level from another context is scaled by the effect of the context on the
        nearest size that both contexts have.
        """
        if size in self._levels:
            return self._levels[size].unit
        if size not in self._units:
            nearest = self._nearest(size, self._levels)
            unit = self._levels[nearest].unit * self._effect(nearest.context, size)
            self._units[size] = unit * self._correction(nearest, size)
        return self._units[size]

    def _correction(self, known: _Size, size: _Size) -> float:
        """Unit of a size over the unit of a `known` size, by the learnt cost of rows."""

        def relative(extra: float) -> float:
            return (1.0 + self._row_cost.factor * extra) / (1.0 + extra)

        extras = [self.cost.of(each.rows) - 1.0 for each in (size, known)]
        return relative(extras[0]) / relative(extras[1])

    def _effect(self, context: int, size: _Size) -> float:
        """Level of a size near `size` over the level of that size at another `context`."""
        levels = self._levels
        here = [seen for seen in levels if seen.context == size.context]
        both = [seen for seen in here if seen._replace(context=context) in levels]
        if not both:
            return 1.0
        nearest = self._nearest(size, both)
        return levels[nearest].unit / levels[nearest._replace(context=context)].unit

    @staticmethod
    def _nearest(size: _Size, sizes: Iterable[_Size]) -> _Size:
        return min(sizes, key=lambda seen: [abs(a - b) for a, b in zip(seen, size, strict=True)])
