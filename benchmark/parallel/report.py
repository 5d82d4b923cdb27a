"""The report of `bench_batch_parallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.statistics import number, percent
from benchmark.parallel.comparisons import Comparison, Comparisons
from benchmark.parallel.measures import Row
from benchmark.parallel.plan import DESCRIPTIONS
from benchmark.parallel.targets import Target

COLUMNS = (
    "k",
    "in flight",
    "tokens/s",
    "decoding",
    "speedup",
    "equal hw",
    "mean lat. (s)",
    "p99 lat. (s)",
    "ITL (ms)",
    "p99 ITL (ms)",
    "accept length",
    "hidden",
    "V (ms)",
    "D (ms)",
    "waited (ms)",
    "identical",
    "others",
    "passes by",
)
DISTURBED_SHARE = 0.1
"""Share of all processors taken by other processes, above which a cell is doubtful."""
COMPARED = ("k", "in flight", "ratio", "with prompts", "bound", "of bound", "V (ms)", "D (ms)")

METHOD = """A block is some prompts, a number of requests in flight and a k, the most draft tokens
of a request in a pass. All configurations serve a block one after another, and the order turns
around from round to round. All pipelines run on one server with one sidecar, set to another
pipeline between cells; servers that do not serve are stopped. A cell's prompts are sent at once
to a server with an empty cache, so that what is not in flight waits in its queue, and answers have
one length. Tokens/s are all tokens over all the time, and decoding leaves out the time in which
prompts are read and the token that reading a prompt gives. Latencies count from a request's
arrival. Inter-token latencies (ITL) are of rounds of their own, in which answers are streamed,
without none-equal, whose target leaves the client no core. V is a verify pass without waits, D the
sidecar's drafting for it, and hidden the share of D that the target did not wait for. sequential,
sequential-half, halves and ahead verify k draft tokens of each request in every pass, from steps
alone; auto and queue those that they expect to pay. Identical is the share of requests with the
greedy output of no speculation; in bfloat16 kernels of different shapes may break ties differently.
Others is the share of all processors that went to anything but the server, its sidecar and the
client: where it is not near 0 something else disturbed the cell. Figures are medians over rounds,
and ratios medians of the ratios of each round."""


CHOICE_HEAD = ("", "k", "in flight", "best other", "ratio", "with prompts")


def report_of(
    rows: Sequence[Row],
    comparisons: Comparisons,
    targets: Sequence[Target],
    failed: Mapping[str, str],
    figures: tuple[Figure, ...] = (),
    facts: Mapping[str, Any] | None = None,
) -> Report:
    """Tables of all rows, of the comparisons, of what `auto` chose, and of the targets."""
    served = dict.fromkeys(row.point.config for row in rows)
    legend = "; ".join(f"{name}: {DESCRIPTIONS[name]}" for name in served)
    choices = [
        [c.config, str(c.k), str(c.in_flight), c.best, str(c.ratio), str(c.whole_ratio)]
        for c in comparisons.choices
    ]
    tables = [
        Table("Configurations", ["", *COLUMNS], [_cells(row) for row in rows], legend),
        _compared("Halves with 2m in flight over sequential with m", comparisons.paper),
        _compared("Over sequential, with the same in flight", comparisons.same_in_flight),
        Table("The server's own choice, over the best of the others", CHOICE_HEAD, choices),
        Table(
            "Targets",
            ["target", "", "measured"],
            [[one.goal, one.verdict, one.found] for one in targets],
            is_prose=True,
        ),
    ]
    title = "Batch-parallel speculation"
    return Report(title, disturbed(rows), tables, METHOD, facts or {}, figures, failed)


def disturbed(rows: Sequence[Row]) -> str:
    """A sentence about cells beside which other processes ran; empty if there are none."""
    found = [
        f"{row.point.config}, k = {row.point.k or '–'}, {row.running} in flight"
        for row in rows
        if row.figures.others_share > DISTURBED_SHARE
    ]
    if not found:
        return ""
    return (
        f"Do not trust {len(found)} of {len(rows)} cells, beside which other processes took more "
        f"than {DISTURBED_SHARE:.0%} of the processors: {'; '.join(found)}."
    )


def _cells(row: Row) -> list[str]:
    figures, streamed = row.figures, row.streamed
    return [
        row.point.config,
        number(row.point.k),
        str(row.running),
        f"{figures.tokens_per_s:.1f}",
        f"{figures.decode_tokens_per_s:.1f}",
        number(row.speedup),
        number(row.equal_hardware),
        number(figures.latency_mean),
        number(figures.latency_p99),
        _milliseconds(streamed.itl_mean if streamed else None),
        _milliseconds(streamed.itl_p99 if streamed else None),
        number(figures.accept_len),
        percent(figures.hidden_share),
        _milliseconds(figures.verify_s),
        _milliseconds(figures.draft_s),
        _milliseconds(figures.waited_s),
        percent(row.identical),
        percent(figures.others_share),
        ", ".join(f"{name} {share:.0%}" for name, share in row.used.items()) or "–",
    ]


def _compared(title: str, found: Sequence[Comparison]) -> Table:
    lines = [
        [
            one.pipeline,
            str(one.k),
            str(one.in_flight),
            str(one.ratio),
            str(one.whole_ratio),
            number(one.bound),
            percent(one.of_bound),
            _milliseconds(one.verify_s),
            _milliseconds(one.draft_s),
        ]
        for one in found
    ]
    return Table(title, ["", *COMPARED], lines)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"
