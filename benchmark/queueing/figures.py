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
    return (
        _match_rates(summary),
        _request_speedups(summary),
        _speedup_by_completions(summary),
        _against_lookup(summary),
    )


def _match_rates(summary: Summary) -> Figure:
    rows = {row.config: rates for row in summary.rows if (rates := row.match_rates)}
    axis = "match rate of a request"
    return Figure(
        "match_rate",
        "Match rate",
        "Accepted over proposed draft tokens. A point is a request, the box spans the quartiles, "
        "the line is the mean. SGLang's NGRAM fills every pass with draft tokens; QSPEC proposes "
        "those that it expects to pay.",
        charts.distributions(rows, axis, COLORS) if rows else None,
    )


def _request_speedups(summary: Summary) -> Figure:
    rows = {
        row.config: row.request_speedups
        for row in summary.rows
        if row.request_speedups and not row.config.startswith("none")
    }
    axis = "speedup of a request (×)"
    return Figure(
        "request_speedup",
        "Speedup of each request",
        "Service time per token without speculation on the target's cores over that of the "
        "configuration; a request's service is its latency without its time in the queue. The box "
        "spans the quartiles, the line is the mean. Dashed: no speculation.",
        charts.distributions(rows, axis, COLORS, reference=1.0) if rows else None,
    )


def _speedup_by_completions(summary: Summary) -> Figure:
    points = {
        COMPLETIONS[row.config]: row.request_speedups
        for row in summary.rows
        if row.config in COMPLETIONS and row.request_speedups
    }
    return Figure(
        "speedup_by_completions",
        "Speedup by number of completions",
        "Mean speedup of the requests, with a bar over their quartiles. Dashed: no speculation.",
        charts.spread_by_number(
            points,
            "completions n drafted of each waiting prompt",
            "mean speedup of a request (×)",
            COLORS["qspec-4"],
        )
        if points
        else None,
    )


def _against_lookup(summary: Summary) -> Figure:
    most = [row.config for row in summary.rows if row.config in COMPLETIONS][-1:]
    series = {
        row.config: {
            group: speedup.median
            for group, rows in summary.by_group.items()
            if (speedup := rows[place].speedup) is not None
        }
        for place, row in enumerate(summary.rows)
        if row.config in ("ngram", "lookup", *most) and row.speedup is not None
    }
    return Figure(
        "against_ngram",
        "Queue speculation and n-gram speculation, by group",
        "Tokens per second of a group's queues over those without speculation (dashed).",
        charts.bars_by_group(series, "speedup (× tokens/s)", COLORS) if series else None,
    )
