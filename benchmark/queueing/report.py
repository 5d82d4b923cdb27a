"""The report of `bench_queue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.statistics import number, percent
from benchmark.queueing.configurations import DESCRIPTIONS, LARGEST
from benchmark.queueing.summary import Row, Summary

COLUMNS = (
    "tokens/s",
    "speedup",
    "equal hw",
    "mean lat. (s)",
    "p99 lat. (s)",
    "accept length",
    "match rate",
    "passes/token",
    "drafted, wasted",
    "identical",
    "accepted by source",
)
METHOD = """A block is some prompts of one group, sent as one queue to a server with an empty cache.
All configurations serve a block one after another, and the order reverses from block to block;
servers that do not serve are stopped. Tokens/s are all tokens over the time of all blocks, and the
speedup is over none. Equal hardware (hw) compares the configuration with no speculation where both
have the cores of target and sidecar. Latencies count from a request's arrival. The accept length is
output tokens per target pass after the prompt's; passes per token include the prompt's. Wasted are
tokens that the sidecar drafted and no pass accepted. Identical is the share of requests with the
greedy output of none; in bfloat16, kernels of different shapes may break ties differently. With
several rounds the tables show medians over rounds, and the figures the requests of all rounds."""


def report_of(
    summary: Summary, figures: tuple[Figure, ...] = (), facts: Mapping[str, Any] | None = None
) -> Report:
    """Tables of the configurations, and of speedups and accept lengths by group."""
    legend = "; ".join(f"{row.config}: {DESCRIPTIONS[row.config]}" for row in summary.rows)
    groups = list(summary.by_group)
    speedups, lengths = [], []
    for place, row in enumerate(summary.rows):
        found = [summary.by_group[group][place] for group in groups]
        speedups.append([row.config, *(number(one.speedup) for one in found)])
        lengths.append([row.config, *(number(one.figures.accept_len) for one in found)])
    tables = [
        Table(
            "Configurations", ["", *COLUMNS], [_cells(row, summary) for row in summary.rows], legend
        ),
        Table("Speedup by group", ["speedup", *groups], speedups),
        Table("Accept length by group", ["accept length", *groups], lengths),
    ]
    return Report(
        "Queue speculation",
        _headline(summary),
        tables,
        METHOD,
        facts or {},
        figures,
        summary.failed,
    )


def _headline(summary: Summary) -> str:
    speedups = [(row.speedup, row.config) for row in summary.rows if row.speedup is not None]
    parts = []
    if speedups:
        best, config = max(speedups, key=lambda found: found[0].median)
        parts.append(f"Most tokens per second: {config}, {best} × no speculation.")
    equal = summary.equal_hardware.get(LARGEST)
    if equal is not None:
        parts.append(
            f"With no speculation on the cores of target and sidecar, {LARGEST} has {equal} × its "
            "tokens per second."
        )
    return " ".join(parts)


def _cells(row: Row, summary: Summary) -> list[str]:
    figures, accepted = row.figures, row.accepted
    wasted = "–" if figures.drafted is None else f"{figures.drafted:.0f}, {figures.wasted:.0f}"
    shares = (f"{name} {n / accepted.total():.0%}" for name, n in accepted.items() if n)
    return [
        row.config,
        f"{figures.tokens_per_s:.1f}",
        number(row.speedup),
        number(summary.equal_hardware[row.config]),
        number(figures.latency_mean),
        number(figures.latency_p99),
        number(figures.accept_len),
        number(figures.match_rate),
        number(figures.passes_per_token),
        wasted,
        percent(row.identical),
        ", ".join(shares) or "–",
    ]
