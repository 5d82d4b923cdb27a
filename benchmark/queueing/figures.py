"""Draws the figures of `bench_queue`, each with a title and a caption."""

from __future__ import annotations

import statistics

from benchmark.harness import charts
from benchmark.harness.report import Figure
from benchmark.queueing.configurations import COMPLETIONS
from benchmark.queueing.summary import Summary

SPEEDUP = "speedup of a request (×)"


def figures(summary: Summary) -> tuple[Figure, ...]:
    """All figures; none without matplotlib."""
    if not charts.available():
        return ()
    rates = {row.config: found for row in summary.rows if (found := row.match_rates)}
    every = {row.config: found for row in summary.rows if (found := row.request_speedups)}
    speedups = {name: found for name, found in every.items() if not name.startswith("none")}
    means: dict[float, float] = {
        COMPLETIONS[name]: statistics.mean(found)
        for name, found in every.items()
        if name in COMPLETIONS
    }
    return (
        Figure(
            "match_rate",
            "Match rate",
            "Accepted over proposed draft tokens of a request. The box spans the quartiles, the "
            "line is the mean. SGLang's NGRAM fills every pass with draft tokens; QSPEC proposes "
            "those that it expects to pay.",
            charts.distributions(rates, "match rate of a request") if rates else None,
        ),
        Figure(
            "request_speedup",
            "Speedup of each request",
            "Service time per token without speculation on the target's cores over that of the "
            "configuration; service time is latency without the time in the queue. The box spans "
            "the quartiles, the line is the mean. Dashed: no speculation.",
            charts.distributions(speedups, SPEEDUP, 1.0) if speedups else None,
        ),
        Figure(
            "speedup_by_completions",
            "Speedup by number of completions",
            "Mean speedup of the requests. Dashed: no speculation.",
            charts.lines(
                {"": {"mean": means}},
                "completions drafted per waiting prompt",
                f"mean {SPEEDUP}",
                reference=1.0,
            )
            if means
            else None,
        ),
    )
