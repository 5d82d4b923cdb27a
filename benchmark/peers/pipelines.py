"""The pipelines of `bench_peers`, by the number k of draft tokens of a request in a pass.

One server with one sidecar is set to each pipeline and each k in turn, so all pipelines have the
same drafter. Its target has one core and its sidecar another, as if they were two devices.

V and D are the times to verify and to draft for the same requests. A round takes V + D in sequence
and max(V, D) at best, so no pipeline is more than (V + D) / max(V, D) times as fast as
`sequential`. These ratios are of decoded tokens per second without the prefill time, which no
pipeline changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.harness.report import Table
from benchmark.harness.run import Run
from benchmark.harness.statistics import Ratio, number, percent, ratio_record, rounded
from benchmark.harness.summary import DIGITS, Load, Row, Summary, table

BASELINE = "none"
"""No speculation, on the cores of the target alone."""
AUTO, QUEUE, AHEAD = "auto", "queue", "ahead"
SEQUENTIAL, HALVES = "sequential", "halves"
LOOKAHEAD = 16
"""Maximum number of draft tokens ahead of the committed output, unless k is larger."""
HEADS = (
    *("config", "k", "in flight", "arrival", "sampling", "tokens/s", "over none"),
    *("over sequential", "bound", "accept length", "hidden", "V (ms)", "D (ms)", "waited (ms)"),
    *("identical", "passes by"),
)
NOTE = (
    "k: draft tokens of a request in a pass; V: a verify pass without waits, D: the sidecar's "
    "drafting for it; bound: of decoded tokens per second over those of sequential; hidden: share "
    "of D in which the target did not wait. sequential, halves and ahead verify k step drafts of "
    "each request in every pass; auto and queue verify those that they expect to pay"
)


@dataclass(frozen=True)
class Pipeline:
    """Settings of a running server with a sidecar."""

    mode: int
    """Value of the setting `qspec_mode`."""
    sources: tuple[str, ...] = ()
    """Allowed draft sources; all if empty."""
    fixed: bool = True
    """Whether each pass verifies k draft tokens of each request, even if they do not pay."""
    doubled: bool = False
    """Whether drafts run up to two passes ahead of the committed output."""

    def step_tokens(self, k: int) -> int:
        """Maximum number of draft tokens ahead of the committed output."""
        return 2 * k + 1 if self.doubled else max(LOOKAHEAD, k)

    def runtime(self, k: int) -> dict[str, int]:
        """The settings for at most `k` draft tokens of a request in a pass."""
        return {
            "qspec_mode": self.mode,
            "qspec_draft_token_num": k + 1,
            "qspec_step_tokens": self.step_tokens(k),
            "qspec_fixed_width": int(self.fixed),
        }


PIPELINES: Mapping[str, Pipeline] = {
    AUTO: Pipeline(4, fixed=False),
    QUEUE: Pipeline(0, ("queue",), fixed=False),
    AHEAD: Pipeline(3, ("step",), doubled=True),
    SEQUENTIAL: Pipeline(1, ("step",)),
    HALVES: Pipeline(2, ("step",)),
}
"""The pipelines in the order of serving: those that are compared with each other are neighbours."""
DESCRIPTIONS = {
    BASELINE: "no speculation, on the target's cores",
    AUTO: "the server's own choice, with drafts from all sources",
    QUEUE: "drafts made while requests wait, and none after",
    AHEAD: "the sidecar drafts ahead of what is being verified",
    SEQUENTIAL: "the sidecar drafts k tokens for all requests, then the target verifies them",
    HALVES: "one half of the requests is verified while the sidecar drafts for the other",
}


def over_sequential(summary: Summary, row: Row) -> Ratio | None:
    """Decoded tokens per second over those of `sequential` with the same load."""
    return summary.ratio(row.config, SEQUENTIAL, row.load, figure=_decoded)


def over_none(summary: Summary, row: Row) -> Ratio | None:
    """Tokens per second over no speculation on the target's cores."""
    return summary.ratio(row.config, BASELINE, row.load, without_k(row.load))


def bound(summary: Summary, load: Load) -> float | None:
    """The largest possible ratio over `sequential`, by its V and D."""
    row = summary.row(SEQUENTIAL, load)
    verify, draft = (row.figures.verify_s, row.figures.draft_s) if row else (None, None)
    return (verify + draft) / max(verify, draft) if verify and draft else None


def auto_over_best(summary: Summary) -> Ratio | None:
    """The smallest ratio of `auto` over another pipeline with the same load."""
    return Ratio.smallest(
        summary.ratio(AUTO, name, row.load, figure=_decoded)
        for row in summary.rows
        if row.config == AUTO
        for name in PIPELINES
        if name != AUTO
    )


def record_of(summary: Summary, row: Row) -> dict[str, Any]:
    """The row for JSON, with what `qspec theory --fit` reads."""
    k, pipeline = row.load.get("k"), PIPELINES.get(row.config)
    found = {**row.record(), "pipeline": row.config, "k": k}
    if pipeline is not None and k is not None:
        found |= {"step_tokens": pipeline.step_tokens(k), "used": rounded(used(row), DIGITS)}
        found |= ratio_record("over_none", over_none(summary, row), DIGITS)
        found |= ratio_record("over_sequential", over_sequential(summary, row), DIGITS)
        found["bound"] = rounded(bound(summary, row.load), DIGITS)
    return found


def table_of(summary: Summary) -> Table:
    """A line for each pipeline and load; without lines if no pipeline was served."""
    own: Mapping[str, Callable[[Row], object]] = {
        "over none": lambda row: over_none(summary, row),
        "over sequential": lambda row: over_sequential(summary, row),
        "bound": lambda row: number(bound(summary, row.load)),
        "passes by": lambda row: ", ".join(f"{n} {percent(s)}" for n, s in used(row).items()),
    }
    rows = [row for row in summary.rows if row.config in PIPELINES]
    return table("Pipelines", rows, HEADS, NOTE, own)


def used(row: Row) -> dict[str, float]:
    """Share of the verify passes by pipeline."""
    counts: Counter[str] = Counter()
    for run in row.rounds.values():
        for name, counted in (run.counters.pipelines if run.counters else {}).items():
            counts[name] += int(counted["passes"])
    return {name: count / counts.total() for name, count in counts.items() if count}


def without_k(load: Load) -> dict[str, Any]:
    """The load of a configuration without drafts."""
    return {name: value for name, value in load.items() if name != "k"}


def _decoded(run: Run) -> float:
    return run.decode_tokens_per_s
