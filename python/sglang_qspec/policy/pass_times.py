"""What passes of the target take by their requests and width, learnt while they run."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from sglang_qspec.errors import ConfigError

COMMON = 0.1
"""Weight of the latest pass in what has become of all passes lately."""
OWN = 0.02
"""Its weight in how passes of its size compare with others; more while that is hardly known."""
SETTLED = 20
"""Passes of a size after which it is known well enough to tell of all."""
NEWS = 0.0005
"""Weight of a pass in how those of other widths compare: what is never used must not be condemned
forever by its last pass."""
FIRST_GAP, LONGEST_GAP = 4, 256
"""Wider passes after which a plain one is due, for it is what all others are measured by: twice as
many each time."""
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


@dataclass
class _Level:
    """How many times `PassCost` passes of one size take, in seconds."""

    unit: float
    seen: int = 0
    """Passes."""


@dataclass
class _Turn:
    """When passes of some order of magnitude of requests were plain."""

    wider: int = 0
    """Passes since the last one."""
    gap: int = FIRST_GAP


class PassTimes:
    """Seconds of a pass by its requests and its width, in tokens of each request.

    `cost` gives the shape within a size, which is a width and a binary order of magnitude of
    requests; the passes that were seen give each size its level, and that of the nearest one stands
    for those not seen yet. What slows all passes alike, such as contexts that grow or a processor
    that is shared, is learnt soon and from whichever passes are made, so that sizes which are not
    in use just then still compare as they did.
    """

    def __init__(self, cost: PassCost = PassCost()) -> None:
        self.cost = cost
        self._levels: dict[tuple[int, int], _Level] = {}
        self._pace = 1.0
        """What all levels have become multiplied with."""
        self._turns: dict[int, _Turn] = {}

    def seconds(self, requests: int, width: int) -> float:
        """What a pass over `width` tokens of each of so many requests is expected to take."""
        level = self._nearest((requests.bit_length(), width))
        unit = FIRST_UNIT if level is None else level.unit * self._pace
        return self.cost.of(requests * width) * unit

    def observe(self, requests: int, width: int, seconds: float) -> None:
        """A pass over `width` tokens of each of so many requests took so long."""
        turn = self._turns.setdefault(requests.bit_length(), _Turn())
        turn.wider += 1
        if width == 1:
            turn.wider, turn.gap = 0, min(2 * turn.gap, LONGEST_GAP)
        key = requests.bit_length(), width
        nearest, level = self._nearest(key), self._levels.get(key)
        if nearest is None:
            self._levels[key] = _Level(seconds / self.cost.of(requests * width), 1)
            return
        if level is None:
            # The first pass of a size also makes what passes of its size need.
            self._levels[key] = _Level(nearest.unit)
            return
        # A prompt's pass in between, or a machine that was busy, is no news about passes.
        error = min(seconds / self.seconds(requests, width), 1.5) - 1.0
        level.seen += 1
        level.unit *= 1.0 + max(OWN, 1 / level.seen) * error
        if level.seen > SETTLED:
            self._pace *= 1.0 + COMMON * error
        for (magnitude, other), theirs in self._levels.items():
            if magnitude == key[0] and other != width:
                theirs.unit += NEWS * (level.unit - theirs.unit)

    def plain_is_due(self, requests: int) -> bool:
        """Whether a plain pass over so many requests has not been made for long."""
        turn = self._turns.get(requests.bit_length())
        return turn is not None and turn.wider >= turn.gap

    def _nearest(self, key: tuple[int, int]) -> _Level | None:
        """That of this size, or of the nearest by requests, and then by width, that was seen."""
        if key in self._levels or not self._levels:
            return self._levels.get(key)
        requests, width = key
        nearest = min(
            self._levels, key=lambda seen: (abs(seen[0] - requests), abs(log2(seen[1] / width)))
        )
        return self._levels[nearest]
