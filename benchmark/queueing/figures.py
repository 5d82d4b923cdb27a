"""The figures of `bench_queue`, each with a title and a caption."""

from __future__ import annotations

import statistics

from benchmark.harness import charts
from benchmark.harness.report import Figure
from benchmark.queueing.configurations import COMPLETIONS
from benchmark.queueing.summary import Summary

SPEEDUP = "speedup of a request (×)"


def figures(summary: Summary) -> tuple[Figure, ...]:
    """All four figures; none without matplotlib."""
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
    series = _by_group(summary)
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
        Figure(
            "against_ngram",
            "Queue speculation and n-gram speculation, by group",
            "Tokens per second of a group's queues over those without speculation (dashed).",
            charts.bars_by_group(series, "speedup (× tokens/s)") if series else None,
        ),
    )


def _by_group(summary: Summary) -> dict[str, dict[str, float]]:
    """Median speedups of the lookups, and of the configuration with the most completions."""
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
