"""What passes of the target take by their rows, learnt while they run."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.errors import ConfigError

MEMORY = 0.05
"""Weight of the latest pass in what passes of its size take."""
NEWS = 0.001
"""Its weight in what those of other sizes take: what is never used must not be condemned forever by
its last pass."""
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


class PassTimes:
    """Seconds of a pass by its rows.

    `cost` gives the shape within a binary order of magnitude of rows; the passes that were seen
    give each its level, and that of the nearest one stands for those not seen yet.
    """

    def __init__(self, cost: PassCost = PassCost()) -> None:
        self.cost = cost
        self._units: dict[int, float] = {}

    def seconds(self, rows: int) -> float:
        """What a pass of so many rows is expected to take."""
        return self.cost.of(rows) * self._unit(rows.bit_length())

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        unit, key = seconds / self.cost.of(rows), rows.bit_length()
        before = self._units.get(key)
        # A prompt's pass in between, or a machine that was busy, is no news about passes.
        unit = min(unit, 2 * self._unit(key)) if self._units else unit
        self._units[key] = unit if before is None else before + MEMORY * (unit - before)
        for other in self._units.keys() - {key}:
            self._units[other] += NEWS * (unit - self._units[other])

    def _unit(self, key: int) -> float:
        if not self._units:
            return FIRST_UNIT
        return self._units[min(self._units, key=lambda seen: abs(seen - key))]
