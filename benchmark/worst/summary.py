"""Compares QSPEC with no speculation, and adaptive with fixed widths, in `bench_worst_case`."""

from __future__ import annotations

from typing import Any

from benchmark.harness import charts
from benchmark.harness.report import Report, line_figure
from benchmark.harness.statistics import Ratio, number, ratio_record
from benchmark.harness.summary import Summary, table
from benchmark.worst.cases import ADAPTIVE, SHOWN, width_of

HEADS = ("case", "in flight", "config", "tokens/s", "speedup", "proposed", "accepted", "others")
NOTE = (
    "proposed, accepted: draft tokens of a request in a pass; others: largest share of the "
    "processors that other processes took in a round"
)
METHOD = """All configurations serve a case before the next case, in an order that reverses from
round to round; the other servers are stopped meanwhile. Ratios are of tokens per second."""


def worst_ratio(summary: Summary) -> Ratio | None:
    """The smallest ratio of adaptive over no speculation; None without common rounds."""
    return Ratio.smallest(row.speedup for row in summary.rows if row.config == ADAPTIVE)


def over_best_fixed(summary: Summary) -> Ratio | None:
    """The smallest ratio of adaptive over the fastest fixed width with the same load."""
    return Ratio.smallest(
        summary.ratio(ADAPTIVE, row.config, row.load)
        for row in summary.rows
        if width_of(row.config) is not None
    )


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    return {
        **ratio_record("worst_ratio", worst_ratio(summary)),
        **ratio_record("adaptive_over_best_fixed_min", over_best_fixed(summary)),
        "rows": [row.record() for row in summary.rows],
    }


def report_of(summary: Summary) -> Report:
    """A table, and a chart of the speedup by requests in flight, a line for each case."""
    headline = (
        f"Adaptive width over no speculation, at least: {number(worst_ratio(summary))}. Over the "
        f"fastest fixed width, at least: {number(over_best_fixed(summary))}."
    )
    points = (
        ("", SHOWN[row.load["case"]], row.load["in_flight"], row.speedup.median)
        for row in summary.rows
        if row.config == ADAPTIVE and row.speedup
    )
    caption = "Tokens per second of QSPEC with adaptive width over those of no speculation."
    axes = ("requests in flight; dashed: no speculation", "speedup (× tokens/s)")
    colors = dict(zip(SHOWN.values(), charts.COLORS, strict=True))
    drawn = line_figure(
        *("speedup", "Speedup by requests in flight", caption, points, axes),
        colors=colors,
        reference=1.0,
    )
    cases = table("Cases", summary.rows, HEADS, NOTE)
    title = "The cost of drafts that do not pay"
    return Report(title, headline, [cases], METHOD, figures=drawn)
