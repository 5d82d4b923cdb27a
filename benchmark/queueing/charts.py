"""The four charts of the QueueSpec post, for the measured configurations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmark.harness.report import Chart
from benchmark.queueing.configurations import COMPLETIONS, LARGEST
from benchmark.queueing.summary import Row, Summary

SPEEDUP = "speedup of a request (×)"
AGAINST = {
    LARGEST: f"queue speculation ({COMPLETIONS[LARGEST]} completions)",
    "lookup": "n-grams of prompt and output",
    "ngram": "SGLang's NGRAM",
}
"""Configurations of the last chart, with their names in it."""


def charts(summary: Summary) -> tuple[Chart, ...]:
    """All charts; one without data if no configuration that it shows was served."""
    rates = {row.config: found for row in summary.rows if (found := row.match_rates)}
    every = {row.config: found for row in summary.rows if (found := row.request_speedups)}
    speedups = {name: found for name, found in every.items() if not name.startswith("none")}
    means = [
        (completions, round(statistics.mean(every[name]), 3))
        for name, completions in COMPLETIONS.items()
        if name in every
    ]
    return (
        Chart(
            "Match rate",
            "Accepted over proposed draft tokens of a request. The box spans the quartiles, the "
            "line is the mean. SGLang's NGRAM fills every pass with draft tokens; QSPEC proposes "
            "those that it expects to pay.",
            "boxes",
            _boxes(rates, xLabel="match rate of a request", top=1),
        ),
        Chart(
            "Speedup of each request",
            "Service time per token without speculation on the target's cores over that of the "
            "configuration; service time is latency without the time in the queue. The box spans "
            "the quartiles, the line is the mean. Dashed: no speculation.",
            "boxes",
            _boxes(speedups, xLabel=SPEEDUP, reference=1),
        ),
        Chart(
            "Speedup by number of completions",
            "Mean speedup of the requests. Dashed: no speculation.",
            "lines",
            {
                "series": [{"name": "mean", "points": means}],
                "xLabel": "completions drafted per waiting prompt",
                "ticks": [completions for completions, _ in means],
                "reference": 1,
            }
            if means
            else None,
        ),
        Chart(
            "Queue speculation against n-grams of the prompt",
            "Tokens per second over no speculation on the target's cores, by group of prompts. "
            "N-gram speculation needs no draft model and no second device. Dashed: no speculation.",
            "dots",
            _against(summary),
        ),
    )


def _boxes(rows: dict[str, list[float]], **options: Any) -> dict[str, Any] | None:
    shown = [
        {"name": name, "values": [round(value, 4) for value in values]}
        for name, values in rows.items()
    ]
    return {"rows": shown, **options} if shown else None


def _against(summary: Summary) -> dict[str, Any] | None:
    """A row for all prompts and for each group; None without queue speculation or n-grams."""
    served = {row.config for row in summary.rows if row.speedup}
    names = [name for name in AGAINST if name in served]
    if LARGEST not in names or len(names) < 2:
        return None
    several = summary.by_group if len(summary.by_group) > 1 else {}
    groups: dict[str, Sequence[Row]] = {"all prompts": summary.rows, **several}
    rows = [
        {"name": group, "values": [_median(rows, name) for name in names]}
        for group, rows in groups.items()
    ]
    texts = [AGAINST[name] for name in names]
    return {"names": texts, "rows": rows, "xLabel": "tokens/s over none (×)", "reference": 1}


def _median(rows: Sequence[Row], name: str) -> float | None:
    """The speedup of a configuration; None if it has none in this group."""
    speedup = next(row.speedup for row in rows if row.config == name)
    return None if speedup is None else round(speedup.median, 3)
