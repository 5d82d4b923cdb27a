"""The four charts of the QueueSpec post, for the measured configurations."""

from __future__ import annotations

import statistics
from typing import Any

from benchmark.harness.report import Chart
from benchmark.harness.run import pairs
from benchmark.harness.summary import Load, Row, Summary
from benchmark.queueing.configurations import COMPLETIONS, LARGEST
from benchmark.queueing.summary import Blocks

SPEEDUP = "speedup of a request (×)"
AGAINST = {
    LARGEST: f"queue speculation ({COMPLETIONS[LARGEST]} completions)",
    "lookup": "n-grams of prompt and output",
    "ngram": "SGLang's NGRAM",
}
"""Configurations of the last chart, with their names in it."""


def charts(blocks: Blocks) -> tuple[Chart, ...]:
    """All charts; one without data if no configuration that it shows was served."""
    rows = blocks.every.rows
    rates = {row.config: found for row in rows if (found := match_rates(row))}
    every = {row.config: found for row in rows if (found := request_speedups(row))}
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
            _against(blocks),
        ),
    )


def _boxes(rows: dict[str, list[float]], **options: Any) -> dict[str, Any] | None:
    shown = [
        {"name": name, "values": [round(value, 4) for value in values]}
        for name, values in rows.items()
    ]
    return {"rows": shown, **options} if shown else None


def match_rates(row: Row) -> list[float]:
    """Match rate of each request with proposed draft tokens."""
    rates = (answer.match_rate for run in row.rounds.values() for answer in run.answers)
    return [rate for rate in rates if rate is not None]


def request_speedups(row: Row) -> list[float]:
    """Service time per token without speculation over that with it, of each request.

    Service time excludes the queue, where the time depends on earlier requests.
    """
    return [
        (other.service / other.tokens) / (one.service / one.tokens)
        for number in sorted(row.rounds.keys() & row.plain.keys())
        for one, other in pairs(row.rounds[number], row.plain[number])
        if one.tokens and other.tokens
    ]


def _against(blocks: Blocks) -> dict[str, Any] | None:
    """A row for all prompts and for each group; None without queue speculation or n-grams."""
    served = {row.config for row in blocks.every.rows if row.speedup}
    names = [name for name in AGAINST if name in served]
    if LARGEST not in names or len(names) < 2:
        return None
    several = blocks.groups if len(blocks.groups) > 1 else []
    rows = [{"name": "all prompts", "values": [_median(blocks.every, n, {}) for n in names]}]
    rows += [
        {"name": group, "values": [_median(blocks.by_group, n, {"group": group}) for n in names]}
        for group in several
    ]
    texts = [AGAINST[name] for name in names]
    return {"names": texts, "rows": rows, "xLabel": "tokens/s over none (×)", "reference": 1}


def _median(summary: Summary, name: str, load: Load) -> float | None:
    """The speedup of a configuration; None if it has none with this load."""
    row = summary.row(name, load)
    return round(row.speedup.median, 3) if row is not None and row.speedup else None
