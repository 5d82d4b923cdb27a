"""Compares QSPEC with other servers, and with its own parts, in `bench_peers`."""

from __future__ import annotations

import math
from itertools import cycle
from statistics import fmean
from typing import Any

from benchmark.harness import charts
from benchmark.harness.report import Report, Table, fields, line_figure
from benchmark.harness.statistics import Ratio, ratio_record
from benchmark.harness.summary import Load, Summary, table
from benchmark.peers import pipelines
from benchmark.peers.loads import STEADY
from benchmark.peers.pipelines import PIPELINES
from benchmark.peers.servers import AGAIN, LOOKUPS, NAMES, OWN, QSPEC, SGLANG, STEPS

HEADS = ("config", "in flight", "arrival", "sampling", "tokens/s", "speedup", "identical", "others")
NOTE = (
    "speedup: tokens per second over those of SGLang without speculation; identical: share of the "
    "answers that SGLang without speculation gives too; others: largest share of the processors "
    "that other processes took in a round"
)
METHOD = """Each round has prompts of its own for each load, until the file has no more. All servers
answer them in turn, in an order that reverses from round to round; the other servers are stopped
meanwhile. Before a load a server answers short prompts and idles for some seconds. `spread` is the
largest deviation of the answers' lengths from the average under a steady load, as a share. bfloat16
kernels differ between servers, so equal answers are not expected of other projects, and never of
sampled answers."""


def loads_of(summary: Summary) -> list[Load]:
    """The loads that QSPEC has served."""
    return [row.load for row in summary.rows if row.config == QSPEC]


def ratios_of(summary: Summary, load: Load) -> dict[str, Ratio | None]:
    """QSPEC over the fastest of others, by name in the line of JSON; None if none was served."""
    peers = [name for name in summary.configs if name not in OWN]
    others = {"plain": (SGLANG,), "best": (SGLANG, LOOKUPS, STEPS), "best_peer": peers}
    return {
        f"over_{name}": Ratio.smallest(summary.ratio(QSPEC, each, load) for each in found)
        for name, found in others.items()
    }


def worst(summary: Summary, name: str) -> Ratio | None:
    """The smallest of the ratios of this name."""
    return Ratio.smallest(ratios_of(summary, load)[name] for load in loads_of(summary))


def noise(summary: Summary) -> Ratio | None:
    """The smallest ratio of a second server without speculation to the first one."""
    return Ratio.smallest(summary.ratio(AGAIN, SGLANG, load) for load in loads_of(summary))


def means_of(summary: Summary, config: str) -> dict[int, float]:
    """Geometric means of the ratios of a server to plain SGLang, by requests in flight."""
    logs: dict[int, list[float]] = {}
    for row in summary.rows:
        if row.config == config and row.speedup is not None:
            logs.setdefault(row.load["in_flight"], []).append(math.log(row.speedup.median))
    return {in_flight: round(math.exp(fmean(found)), 3) for in_flight, found in logs.items()}


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    loads = []
    for load in loads_of(summary):
        record = dict(load)
        for name, ratio in ratios_of(summary, load).items():
            record |= ratio_record(name, ratio)
        loads.append(record)
    servers = [name for name in summary.configs if name not in (SGLANG, *PIPELINES)]
    return {
        **ratio_record("worst_over_plain", worst(summary, "over_plain")),
        **ratio_record("worst_over_best", worst(summary, "over_best")),
        **ratio_record("worst_again_over_plain", noise(summary)),
        **ratio_record("over_best_peer_min", worst(summary, "over_best_peer")),
        **ratio_record("auto_over_best_min", pipelines.auto_over_best(summary)),
        "mean_over_plain": {config: means_of(summary, config) for config in servers},
        "loads": loads,
        "rows": [pipelines.record_of(summary, row) for row in summary.rows],
    }


def report_of(summary: Summary) -> Report:
    """A table of ratios, one of all figures, one of the pipelines, and charts."""
    found = [{**load, **ratios_of(summary, load)} for load in loads_of(summary)]
    columns = {
        "in flight": lambda row: row["in_flight"],
        **fields("arrival", "sampling"),
        "over SGLang": lambda row: row["over_plain"],
        "over SGLang, lookups and steps": lambda row: row["over_best"],
        "over the fastest peer": lambda row: row["over_best_peer"],
    }
    ratios = Table.of("Tokens per second of QSPEC over those of others", found, columns)
    others = [row for row in summary.rows if row.config not in PIPELINES]
    tables = [ratios, table("Servers", others, HEADS, NOTE), pipelines.table_of(summary)]
    smallest = {
        "QSPEC over SGLang without speculation": worst(summary, "over_plain"),
        "a second SGLang without speculation over the first": noise(summary),
        "QSPEC over the fastest peer": worst(summary, "over_best_peer"),
        "auto over the best other pipeline": pipelines.auto_over_best(summary),
    }
    headline = "; ".join(f"{name}, at least: {ratio}" for name, ratio in smallest.items() if ratio)
    speedups = [
        (row["sampling"], row["arrival"], row["in_flight"], row["over_plain"].median)
        for row in found
        if row["over_plain"] is not None
    ]
    rates = [
        ("", row.config, row.load["in_flight"], row.figures.tokens_per_s)
        for row in others
        if (row.load["arrival"], row.load["sampling"]) == (STEADY, "greedy")
    ]
    x = "requests in flight"
    title, caption = "Speedup by requests in flight", "QSPEC over SGLang without speculation."
    figures = line_figure("ratios", title, caption, speedups, (x, "speedup"), reference=1.0)
    title, caption = "Throughput by requests in flight", "Output tokens per second of each server."
    colors = dict(zip(NAMES, cycle(charts.COLORS), strict=False))
    axes = (x, "tokens/s")
    figures += line_figure("throughput", title, caption, rates, axes, colors=colors)
    return Report("Throughput beside other servers", headline, tables, METHOD, figures=figures)
