"""The four figures of queue speculation, as PNG with a title and a caption."""

from __future__ import annotations

from benchmark.harness import charts
from benchmark.harness.report import Figure
from benchmark.queueing.configurations import COMPLETIONS
from benchmark.queueing.summary import Summary

COLORS = {
    "none": "#94a3b8",
    "none-equal": "#64748b",
    "ngram": "#b45309",
    "ngram-equal": "#92400e",
    "lookup": "#e08e0b",
    "lookup-equal": "#ca8a04",
    "qspec-1": "#8bb8e8",
    "qspec-2": "#5a95d6",
    "qspec-4": "#2f6fb7",
    "qspec-8": "#174a86",
}


def figures(summary: Summary) -> tuple[Figure, ...]:
    """All four figures; none without matplotlib."""
    if not charts.available():
        return ()
    rates = {row.config: found for row in summary.rows if (found := row.match_rates)}
    every = {row.config: found for row in summary.rows if (found := row.request_speedups)}
    speedups = {name: found for name, found in every.items() if not name.startswith("none")}
    points = {COMPLETIONS[name]: found for name, found in every.items() if name in COMPLETIONS}
    series = _by_group(summary)
    speedup_axis = "speedup of a request (×)"
    return (
        Figure(
            "match_rate",
            "Match rate",
            "Accepted over proposed draft tokens. A point is a request, the box spans the "
            "quartiles, the line is the mean. SGLang's NGRAM fills every pass with draft tokens; "
            "QSPEC proposes those that it expects to pay.",
            charts.distributions(rates, "match rate of a request", COLORS) if rates else None,
        ),
        Figure(
            "request_speedup",
            "Speedup of each request",
            "Service time per token without speculation on the target's cores over that of the "
            "configuration; service time is latency without the time in the queue. The box spans "
            "the quartiles, the line is the mean. Dashed: no speculation.",
            charts.distributions(speedups, speedup_axis, COLORS, 1.0) if speedups else None,
        ),
        Figure(
            "speedup_by_completions",
            "Speedup by number of completions",
            "Mean speedup of the requests, with a bar over their quartiles. Dashed: no "
            "speculation.",
            charts.spread_by_number(
                points,
                "completions n drafted of each waiting prompt",
                f"mean {speedup_axis}",
                COLORS["qspec-4"],
            )
            if points
            else None,
        ),
        Figure(
            "against_ngram",
            "Queue speculation and n-gram speculation, by group",
            "Tokens per second of a group's queues over those without speculation (dashed).",
            charts.bars_by_group(series, "speedup (× tokens/s)", COLORS) if series else None,
        ),
    )


def _by_group(summary: Summary) -> dict[str, dict[str, float]]:
    """Median speedups of the lookups and of the most completions."""
    most = [row.config for row in summary.rows if row.config in COMPLETIONS][-1:]
    return {
        row.config: {
            group: speedup.median
            for group, rows in summary.by_group.items()
            if (speedup := rows[place].speedup) is not None
        }
        for place, row in enumerate(summary.rows)
        if row.config in ("ngram", "lookup", *most) and row.speedup is not None
    }
