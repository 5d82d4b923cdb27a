"""The figures of each cell, as medians over its rounds, and ratios between cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from benchmark.parallel.journal import Entry
from benchmark.parallel.plan import (
    BASELINE,
    BASELINE_ALL_CORES,
    BASELINES,
    NAMES,
    PIPELINES,
    running,
)
from benchmark.parallel.serving import CellRun, Gap
from benchmark.queueing.measures import percentile

Speed = Callable[[CellRun], float]


class Cell(NamedTuple):
    """One configuration in the blocks of one kind."""

    in_flight: int
    """Of the block; `sequential-half` runs half of them."""
    k: int | None
    """None for the baselines, which do not depend on it."""
    config: str


@dataclass(frozen=True)
class Figures:
    """Of a cell in one round, or the medians of several; None where there is no such figure.

    Times are in seconds.
    """

    tokens_per_s: float
    decode_tokens_per_s: float
    """Without the time in which prompts are read."""
    latency_mean: float
    """From a request's arrival; all arrive at once."""
    latency_p99: float
    service_mean: float
    """From the end of a request's time in the queue."""
    service_p99: float
    accept_len: float
    """Output tokens per target pass after the prompt's."""
    verify_s: float | None
    """V: a verify pass, without waits."""
    draft_s: float | None
    """D: the sidecar's drafting for served requests, for each verify pass."""
    waited_s: float | None
    """That the target waited for drafts, for each verify pass."""
    hidden_share: float | None
    """Of the drafting time, that which the target did not wait for; not below 0."""
    batch: float | None
    """Requests in a verify pass."""
    width: float | None
    """Tokens of a request in a verify pass, its last committed one and padding included."""
    others_share: float
    """Of all processors, what went to anything but the server, its sidecar and the client."""


class Streamed(NamedTuple):
    """Of the streaming rounds of a cell. Times are in seconds."""

    itl_mean: float
    """From token to token: a piece's tokens share the time since the piece before it."""
    itl_p99: float
    chunk_gap_p99: float
    """From piece to piece, however many tokens are in it."""


@dataclass(frozen=True)
class Row:
    """A cell over all rounds."""

    cell: Cell
    figures: Figures
    streamed: Streamed | None
    speedup: float | None
    """Tokens/s over those without speculation on the target's cores, as many requests in flight."""
    equal_hardware: float | None
    """The same on the cores of target and sidecar together."""
    identical: float | None
    """Share of the requests with the output of no speculation; of several rounds, the least."""
    used: Mapping[str, float]
    """Share of the verify passes by the pipeline that made them."""
    rounds: int

    @property
    def running(self) -> int:
        """Requests at once."""
        return running(self.cell.config, self.cell.in_flight)

    @property
    def step_tokens(self) -> int | None:
        """How far drafts were let run ahead of what was committed."""
        pipeline = PIPELINES.get(self.cell.config)
        if pipeline is None or self.cell.k is None:
            return None
        return pipeline.runtime(self.cell.k)["qspec_step_tokens"]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        streamed = self.streamed._asdict() if self.streamed else dict.fromkeys(Streamed._fields)
        return {
            "pipeline": self.cell.config,
            "k": self.cell.k,
            "in_flight": self.running,
            "step_tokens": self.step_tokens,
            **{f.name: rounded(getattr(self.figures, f.name)) for f in fields(self.figures)},
            **{name: rounded(value) for name, value in streamed.items()},
            "speedup": rounded(self.speedup),
            "equal_hardware_speedup": rounded(self.equal_hardware),
            "identical_share": rounded(self.identical),
            "used": {name: rounded(share) for name, share in self.used.items()},
            "rounds": self.rounds,
        }


class Results:
    """All runs of a journal, by cell and round."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._runs: dict[Cell, dict[int, CellRun]] = {}
        self._gaps: dict[Cell, list[Gap]] = {}
        for entry in entries:
            k = None if entry.config in BASELINES else entry.k
            cell = Cell(entry.in_flight, k, entry.config)
            if entry.streamed:
                self._gaps.setdefault(cell, []).extend(entry.run.gaps)
            else:
                self._runs.setdefault(cell, {})[entry.round] = entry.run

    @property
    def levels(self) -> list[int]:
        """Of requests in flight."""
        return sorted({cell.in_flight for cell in self._runs})

    @property
    def ks(self) -> list[int]:
        return sorted({cell.k for cell in self._runs if cell.k is not None})

    @property
    def configs(self) -> list[str]:
        found = {cell.config for cell in self._runs}
        return [name for name in NAMES if name in found]

    def rows(self) -> list[Row]:
        """By requests in flight, then by k, the baselines first."""
        place = {name: index for index, name in enumerate(NAMES)}
        cells = sorted(self._runs, key=lambda c: (c.in_flight, c.k or 0, place[c.config]))
        return [row for cell in cells if (row := self.row(cell))]

    def row(self, cell: Cell) -> Row | None:
        """None if the cell was not served."""
        runs = self._runs.get(cell)
        if not runs:
            return None
        gaps = self._gaps.get(cell)
        comparable = running(cell.config, cell.in_flight) == cell.in_flight
        plain, equal = (Cell(cell.in_flight, None, name) for name in (BASELINE, BASELINE_ALL_CORES))
        return Row(
            cell,
            medians([figures(run) for run in runs.values()]),
            streamed(gaps) if gaps else None,
            self.ratio(cell, plain) if comparable else None,
            self.ratio(cell, equal) if comparable else None,
            self._identical(cell, plain),
            _used(runs.values()),
            len(runs),
        )

    def ratio(
        self, cell: Cell, other: Cell, speed: Speed = lambda run: run.tokens_per_s
    ) -> float | None:
        """Speed over the other's, each round by itself; None if no round has both."""
        pairs = self._pairs(cell, other)
        return statistics.median(speed(a) / speed(b) for a, b in pairs) if pairs else None

    def decode_ratio(self, cell: Cell, other: Cell) -> float | None:
        """As ratio, without the time in which prompts are read."""
        return self.ratio(cell, other, lambda run: run.decode_tokens_per_s)

    def _identical(self, cell: Cell, other: Cell) -> float | None:
        shares = [
            statistics.fmean(
                x.output == y.output for x, y in zip(a.requests, b.requests, strict=True)
            )
            for a, b in self._pairs(cell, other)
        ]
        return min(shares, default=None)

    def _pairs(self, cell: Cell, other: Cell) -> list[tuple[CellRun, CellRun]]:
        runs, others = self._runs.get(cell, {}), self._runs.get(other, {})
        return [(runs[number], others[number]) for number in sorted(runs.keys() & others.keys())]


def figures(run: CellRun) -> Figures:
    """Of one round."""
    latencies = [request.latency for request in run.requests]
    services = [request.service for request in run.requests]
    passes = sum(request.passes for request in run.requests)
    verify = draft = waited = hidden = batch = width = None
    if run.counters is not None and (total := run.counters.total).passes:
        verify = total.seconds / total.passes
        waited = total.waited_seconds / total.passes
        batch = total.requests / total.passes
        width = total.rows / total.requests
        draft = run.counters.step_seconds / total.passes
        if draft:
            hidden = max(0.0, 1 - waited / draft)
    return Figures(
        tokens_per_s=run.tokens_per_s,
        decode_tokens_per_s=run.decode_tokens_per_s,
        latency_mean=statistics.mean(latencies),
        latency_p99=percentile(latencies, 0.99),
        service_mean=statistics.mean(services),
        service_p99=percentile(services, 0.99),
        accept_len=(run.tokens - len(run.requests)) / passes if passes else 1.0,
        verify_s=verify,
        draft_s=draft,
        waited_s=waited,
        hidden_share=hidden,
        batch=batch,
        width=width,
        others_share=run.others_share,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure, over the rounds that have it."""
    values: dict[str, Any] = {}
    for field in fields(Figures):
        known = [v for one in rounds if (v := getattr(one, field.name)) is not None]
        values[field.name] = statistics.median(known) if known else None
    return Figures(**values)


def streamed(gaps: Sequence[Gap]) -> Streamed:
    """Over all tokens but each answer's first piece."""
    each = [gap.seconds / gap.tokens for gap in gaps for _ in range(gap.tokens)]
    return Streamed(
        statistics.mean(each), percentile(each, 0.99), percentile([g.seconds for g in gaps], 0.99)
    )


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _used(runs: Iterable[CellRun]) -> dict[str, float]:
    counts: dict[str, int] = {}
    for run in runs:
        for name, passes in (run.counters.pipelines if run.counters else {}).items():
            if passes.passes:
                counts[name] = counts.get(name, 0) + passes.passes
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}
