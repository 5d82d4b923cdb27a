"""The report of `bench_batch_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.statistics import percent
from benchmark.harness.summary import Row, milliseconds, table
from benchmark.parallel.comparisons import Choice, Comparison, Comparisons
from benchmark.parallel.measures import Results, running, used
from benchmark.parallel.plan import DESCRIPTIONS

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


HEADS = (
    *("config", "k", "running", "tokens/s", "decoding", "speedup", "equal hw", "mean lat. (s)"),
    *("p99 lat. (s)", "ITL (ms)", "p99 ITL (ms)", "accept length", "hidden", "V (ms)", "D (ms)"),
    *("waited (ms)", "identical", "others", "passes by"),
)
COMPARED: Mapping[str, Callable[[Comparison], object]] = {
    "": lambda one: one.pipeline,
    "k": lambda one: one.k,
    "in flight": lambda one: one.in_flight,
    "ratio": lambda one: one.ratio,
    "with prompts": lambda one: one.whole_ratio,
    "bound": lambda one: one.bound,
    "of bound": lambda one: percent(one.of_bound),
    "V (ms)": lambda one: milliseconds(one.verify_s),
    "D (ms)": lambda one: milliseconds(one.draft_s),
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
    results: Results, comparisons: Comparisons, figures: tuple[Figure, ...] = ()
) -> Report:
    """Tables of all rows, of the comparisons, and of the choices of `auto`."""
    legend = "; ".join(f"{name}: {DESCRIPTIONS[name]}" for name in results.configs)
    paper, same, choices = comparisons.paper, comparisons.same_in_flight, comparisons.choices

    def latency(row: Row, name: str) -> str | None:
        found = results.streamed(row)
        return milliseconds(found and getattr(found, name))

    own: dict[str, Callable[[Row], object]] = {
        "running": running,
        "speedup": results.speedup,
        "equal hw": results.equal_hardware,
        "ITL (ms)": lambda row: latency(row, "itl_mean"),
        "p99 ITL (ms)": lambda row: latency(row, "itl_p99"),
        "passes by": lambda row: (
            ", ".join(f"{name} {share:.0%}" for name, share in used(row).items()) or None
        ),
    }
    tables = [
        table("Configurations", results.rows, HEADS, legend, own),
        Table.of("Halves with 2m in flight over sequential with m", paper, COMPARED),
        Table.of("Over sequential, with the same in flight", same, COMPARED),
        Table.of("The server's own choice, over the best of the others", choices, CHOSEN),
    ]
    title = "Batch-parallel speculation"
    return Report(title, disturbed(results.rows), tables, METHOD, figures=figures)


def disturbed(rows: Sequence[Row]) -> str:
    """A sentence about the cells that other processes disturbed; empty if there are none."""
    found = [
        f"{row.config}, k = {row.load.get('k', '–')}, {running(row)} in flight"
        for row in rows
        if row.others_share > DISTURBED_SHARE
    ]
    if not found:
        return ""
    return (
        f"Do not trust {len(found)} of {len(rows)} cells, in which other processes took more than "
        f"{DISTURBED_SHARE:.0%} of the processors: {'; '.join(found)}."
    )
