"""The report of `bench_batch_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.statistics import percent
from benchmark.parallel.comparisons import Choice, Comparison, Comparisons
from benchmark.parallel.measures import Row
from benchmark.parallel.plan import DESCRIPTIONS
from benchmark.parallel.targets import Target

DISTURBED_SHARE = 0.1
"""The report warns of a cell in which other processes took more than this share of processors."""

METHOD = """A block is some prompts, a number of requests in flight and a k, the maximum number of
draft tokens of a request in a pass. All configurations serve a block before the next block, in an
order that reverses from round to round. All pipelines run on one server with one sidecar, which is
set to another pipeline between cells; the other servers are stopped meanwhile. A cell's prompts are
sent at once to a server with an empty cache, so the others wait in its queue, and all answers have
the same length. Tokens/s are all tokens over all the time; decoding leaves out the prefill time and
the token that a prefill gives. Latencies count from a request's arrival. Inter-token latencies
(ITL) are from rounds of their own with streamed answers, without none-equal, which leaves no core
to the client. V is a verify pass without waits, D is the sidecar's drafting for it, and hidden is
the share of D in which the target did not wait. sequential, sequential-half, halves and ahead
verify k draft tokens of each request in every pass, from step drafts only; auto and queue verify
those that they expect to pay. Identical is the share of requests with the greedy output of no
speculation; in bfloat16 kernels of different shapes may break ties differently. Others is the share
of all processors that other processes took than the server, its sidecar and the client: if it is
far from 0, something disturbed the cell. Figures are medians over rounds, and ratios are medians of
the ratios of each round."""


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "": lambda row: row.point.config,
    "k": lambda row: row.point.k,
    "in flight": lambda row: row.running,
    "tokens/s": lambda row: f"{row.figures.tokens_per_s:.1f}",
    "decoding": lambda row: f"{row.figures.decode_tokens_per_s:.1f}",
    "speedup": lambda row: row.speedup,
    "equal hw": lambda row: row.equal_hardware,
    "mean lat. (s)": lambda row: row.figures.latency_mean,
    "p99 lat. (s)": lambda row: row.figures.latency_p99,
    "ITL (ms)": lambda row: _ms(row.streamed and row.streamed.itl_mean),
    "p99 ITL (ms)": lambda row: _ms(row.streamed and row.streamed.itl_p99),
    "accept length": lambda row: row.figures.accept_len,
    "hidden": lambda row: percent(row.figures.hidden_share),
    "V (ms)": lambda row: _ms(row.figures.verify_s),
    "D (ms)": lambda row: _ms(row.figures.draft_s),
    "waited (ms)": lambda row: _ms(row.figures.waited_s),
    "identical": lambda row: percent(row.identical),
    "others": lambda row: percent(row.figures.others_share),
    "passes by": lambda row: (
        ", ".join(f"{name} {share:.0%}" for name, share in row.used.items()) or None
    ),
}
COMPARED: Mapping[str, Callable[[Comparison], object]] = {
    "": lambda one: one.pipeline,
    "k": lambda one: one.k,
    "in flight": lambda one: one.in_flight,
    "ratio": lambda one: one.ratio,
    "with prompts": lambda one: one.whole_ratio,
    "bound": lambda one: one.bound,
    "of bound": lambda one: percent(one.of_bound),
    "V (ms)": lambda one: _ms(one.verify_s),
    "D (ms)": lambda one: _ms(one.draft_s),
}
CHOSEN: Mapping[str, Callable[[Choice], object]] = {
    "": lambda one: one.config,
    "k": lambda one: one.k,
    "in flight": lambda one: one.in_flight,
    "best other": lambda one: one.best,
    "ratio": lambda one: one.ratio,
    "with prompts": lambda one: one.whole_ratio,
}


def report_of(
    rows: Sequence[Row],
    comparisons: Comparisons,
    targets: Sequence[Target],
    failed: Mapping[str, str],
    figures: tuple[Figure, ...] = (),
    facts: Mapping[str, Any] | None = None,
) -> Report:
    """Tables of all rows, of the comparisons, of the choices of `auto`, and of the targets."""
    served = dict.fromkeys(row.point.config for row in rows)
    legend = "; ".join(f"{name}: {DESCRIPTIONS[name]}" for name in served)
    reached = [[one.goal, one.verdict, one.found] for one in targets]
    paper, same, choices = comparisons.paper, comparisons.same_in_flight, comparisons.choices
    tables = [
        Table.of("Configurations", rows, COLUMNS, legend),
        Table.of("Halves with 2m in flight over sequential with m", paper, COMPARED),
        Table.of("Over sequential, with the same in flight", same, COMPARED),
        Table.of("The server's own choice, over the best of the others", choices, CHOSEN),
        Table("Targets", ["target", "", "measured"], reached, is_prose=True),
    ]
    title = "Batch-parallel speculation"
    return Report(title, disturbed(rows), tables, METHOD, facts or {}, figures, failed)


def disturbed(rows: Sequence[Row]) -> str:
    """A sentence about the cells that other processes disturbed; empty if there are none."""
    found = [
        f"{row.point.config}, k = {row.point.k or '–'}, {row.running} in flight"
        for row in rows
        if row.figures.others_share > DISTURBED_SHARE
    ]
    if not found:
        return ""
    return (
        f"Do not trust {len(found)} of {len(rows)} cells, in which other processes took more than "
        f"{DISTURBED_SHARE:.0%} of the processors: {'; '.join(found)}."
    )


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.1f}"
