"""Computes the figures of each cell, as medians over its rounds, and ratios between cells."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmark.harness.run import Gap, Run, identical_share
from benchmark.harness.statistics import Medians, Ratio, percentile, ratio_record, rounded
from benchmark.parallel import plan
from benchmark.parallel.plan import NAMES, PIPELINES, Cell, running

DIGITS = 4
FIGURES = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "latency_mean",
    "latency_p99",
    "service_mean",
    "service_p99",
    "accept_len",
    "verify_s",
    "draft_s",
    "waited_s",
    "hidden_share",
    "batch",
    "width",
    "others_share",
)
"""Fields of a Run with a median in the JSON line."""


class Point(NamedTuple):
    """A configuration with some requests in flight and some k, over all rounds."""

    in_flight: int
    """Requests in flight of the block; `sequential-half` runs half of them."""
    k: int | None
    """Maximum number of draft tokens of a request in a pass; None for the baselines."""
    config: str


class Streamed(NamedTuple):
    """Inter-token latencies in the streaming rounds, in seconds."""

    itl_mean: float
    """Mean from token to token; the tokens of a piece share the time since the piece before it."""
    itl_p99: float
    chunk_gap_p99: float
    """99th percentile of the time from piece to piece."""


@dataclass(frozen=True)
class Row:
    """A point of the matrix over all rounds."""

    point: Point
    figures: Medians
    streamed: Streamed | None
    speedup: Ratio | None
    """Tokens/s over no speculation on the target's cores, with equal requests in flight."""
    equal_hardware: Ratio | None
    """Tokens/s over no speculation on the cores of target and sidecar."""
    identical: float | None
    """Share of the requests with the output of no speculation; the smallest of the rounds."""

    @property
    def rounds(self) -> int:
        return len(self.figures.runs)

    @property
    def running(self) -> int:
        """Requests that run at once."""
        return running(self.point.config, self.point.in_flight)

    @property
    def used(self) -> dict[str, float]:
        """Share of the verify passes by pipeline."""
        counts: Counter[str] = Counter()
        for run in self.figures.runs:
            for name, counted in (run.counters.pipelines if run.counters else {}).items():
                counts[name] += int(counted["passes"])
        return {name: count / counts.total() for name, count in counts.items() if count}

    @property
    def step_tokens(self) -> int | None:
        """Maximum number of draft tokens ahead of the committed output; None for the baselines."""
        pipeline = PIPELINES.get(self.point.config)
        if pipeline is None or self.point.k is None:
            return None
        return pipeline.runtime(self.point.k)["qspec_step_tokens"]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        streamed = self.streamed._asdict() if self.streamed else dict.fromkeys(Streamed._fields)
        found = {
            "pipeline": self.point.config,
            "k": self.point.k,
            "in_flight": self.running,
            "step_tokens": self.step_tokens,
            **{name: getattr(self.figures, name) for name in FIGURES},
            **streamed,
            **ratio_record("speedup", self.speedup, DIGITS),
            **ratio_record("equal_hardware_speedup", self.equal_hardware, DIGITS),
            "identical_share": self.identical,
            "used": self.used,
            "rounds": self.rounds,
        }
        return {name: rounded(value, DIGITS) for name, value in found.items()}


class Results:
    """All runs of a journal, by point and round."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        self._runs: dict[Point, dict[int, Run]] = {}
        self._gaps: dict[Point, list[Gap]] = {}
        for cell, run in runs.items():
            point = Point(cell.in_flight, cell.k, cell.config)
            if cell.streamed:
                self._gaps.setdefault(point, []).extend(run.gaps)
            else:
                self._runs.setdefault(point, {})[cell.round] = run

    @property
    def levels(self) -> list[int]:
        """Numbers of requests in flight."""
        return sorted({point.in_flight for point in self._runs})

    @property
    def ks(self) -> list[int]:
        return sorted({point.k for point in self._runs if point.k is not None})

    @property
    def configs(self) -> list[str]:
        found = {point.config for point in self._runs}
        return [name for name in NAMES if name in found]

    def rows(self) -> list[Row]:
        """By requests in flight, then by k, the baselines first."""
        points = sorted(self._runs, key=lambda p: (p.in_flight, p.k or 0, NAMES.index(p.config)))
        return [row for point in points if (row := self.row(point))]

    def row(self, point: Point) -> Row | None:
        """None if the point was not served."""
        runs = self._runs.get(point)
        if not runs:
            return None
        gaps = self._gaps.get(point)
        comparable = running(point.config, point.in_flight) == point.in_flight
        plain, equal = (Point(point.in_flight, None, n) for n in plan.BASELINES)
        others = self._runs.get(plain, {})
        shares = [identical_share(run, others[n]) for n, run in runs.items() if n in others]
        return Row(
            point,
            Medians(tuple(runs.values())),
            streamed(gaps) if gaps else None,
            self.ratio(point, plain) if comparable else None,
            self.ratio(point, equal) if comparable else None,
            min(shares, default=None),
        )

    def ratio(
        self,
        point: Point,
        other: Point,
        speed: Callable[[Run], float] = lambda run: run.tokens_per_s,
    ) -> Ratio | None:
        """Speed over the other's in each round; None if no round has both."""
        return Ratio.of(self._runs.get(point, {}), self._runs.get(other, {}), speed)

    def decode_ratio(self, point: Point, other: Point) -> Ratio | None:
        """As `ratio`, but of decoded tokens per second, without the prefill time."""
        return self.ratio(point, other, lambda run: run.decode_tokens_per_s)


def streamed(gaps: Sequence[Gap]) -> Streamed:
    """The latencies of all tokens except those of each answer's first piece."""
    each = [gap.seconds / gap.tokens for gap in gaps for _ in range(gap.tokens)]
    return Streamed(
        statistics.mean(each), percentile(each, 0.99), percentile([g.seconds for g in gaps], 0.99)
    )


def known(rows: Iterable[Row | None], figure: Callable[[Row], float | None]) -> dict[float, float]:
    """A figure by requests in flight, of the rows that have it."""
    return {row.running: v for row in rows if row is not None and (v := figure(row)) is not None}
