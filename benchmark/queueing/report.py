"""The report of `bench_queue`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmark.harness.report import Chart, Report, Table
from benchmark.harness.statistics import percent
from benchmark.queueing.configurations import DESCRIPTIONS, LARGEST
from benchmark.queueing.summary import Row, Summary

METHOD = """A block is some prompts of one group, sent as one queue to a server with an empty cache.
All configurations serve a block before the next block, in an order that reverses from block to
block; the servers of other configurations are stopped meanwhile. Tokens/s are all tokens over the
time of all blocks; the speedup is over none. Equal hardware (hw) compares the configuration with no
speculation where both have the cores of target and sidecar. Latencies count from a request's
arrival. The accept length is output tokens per target pass after the prompt's; passes per token
include the prompt's. Wasted tokens are those that the sidecar drafted and no pass accepted.
Identical is the share of requests with the greedy output of none; in bfloat16, kernels of different
shapes may break ties differently. With several rounds the tables show medians over rounds, and the
charts show the requests of all rounds."""


def report_of(
    summary: Summary, charts: tuple[Chart, ...] = (), facts: Mapping[str, Any] | None = None
) -> Report:
    """Tables of the configurations, and of speedups and accept lengths by group."""
    legend = "; ".join(f"{row.config}: {DESCRIPTIONS[row.config]}" for row in summary.rows)
    columns: dict[str, Callable[[Row], object]] = {
        "": lambda row: row.config,
        "tokens/s": lambda row: f"{row.figures.tokens_per_s:.1f}",
        "speedup": lambda row: row.speedup,
        "equal hw": lambda row: summary.equal_hardware[row.config],
        "mean lat. (s)": lambda row: row.figures.latency_mean,
        "p99 lat. (s)": lambda row: row.figures.latency_p99,
        "accept length": lambda row: row.figures.accept_len,
        "match rate": lambda row: row.figures.match_rate,
        "passes/token": lambda row: row.figures.passes_per_token,
        "drafted, wasted": _drafted,
        "identical": lambda row: percent(row.identical),
        "accepted by source": _accepted,
    }
    tables = [
        Table.of("Configurations", summary.rows, columns, legend),
        _by_group("Speedup", summary, lambda row: row.speedup),
        _by_group("Accept length", summary, lambda row: row.figures.accept_len),
    ]
    texts = ("Queue speculation", _headline(summary), tables, METHOD)
    return Report(*texts, facts or {}, charts=charts, failed=summary.failed)


def _by_group(name: str, summary: Summary, figure: Callable[[Row], object]) -> Table:
    """A line for each configuration, with its figure in each group."""

    def cell(group: str) -> Callable[[int], object]:
        return lambda place: figure(summary.by_group[group][place])

    columns: dict[str, Callable[[int], object]] = {
        name.lower(): lambda place: summary.rows[place].config,
        **{group: cell(group) for group in summary.by_group},
    }
    return Table.of(f"{name} by group", range(len(summary.rows)), columns)


def _headline(summary: Summary) -> str:
    speedups = [(row.speedup, row.config) for row in summary.rows if row.speedup is not None]
    parts = []
    if speedups:
        best, config = max(speedups, key=lambda found: found[0].median)
        parts.append(f"Most tokens per second: {config}, {best} × no speculation.")
    equal = summary.equal_hardware.get(LARGEST)
    if equal is not None:
        parts.append(
            f"{LARGEST} makes {equal} × the tokens per second of no speculation on the cores of "
            "target and sidecar."
        )
    return " ".join(parts)


def _drafted(row: Row) -> str | None:
    drafted, wasted = row.figures.drafted, row.figures.wasted
    return None if drafted is None else f"{drafted:.0f}, {wasted:.0f}"


def _accepted(row: Row) -> str | None:
    total = row.accepted.total()
    return ", ".join(f"{name} {n / total:.0%}" for name, n in row.accepted.items() if n) or None
