"""The report of `bench_queue`."""

from __future__ import annotations

from collections.abc import Callable

from benchmark.harness.report import Chart, Report, Table
from benchmark.harness.summary import COLUMNS, Row, table
from benchmark.queueing.configurations import DESCRIPTIONS, LARGEST
from benchmark.queueing.summary import Blocks

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


HEADS = (
    *("", "tokens/s", "speedup", "equal hw", "mean lat. (s)", "p99 lat. (s)", "accept length"),
    *("match rate", "passes/token", "drafted, wasted", "identical", "accepted by source"),
)


def report_of(blocks: Blocks, charts: tuple[Chart, ...] = ()) -> Report:
    """Tables of the configurations, and of speedups and accept lengths by group."""
    rows = blocks.every.rows
    legend = "; ".join(f"{row.config}: {DESCRIPTIONS[row.config]}" for row in rows)
    own: dict[str, Callable[[Row], object]] = {
        "": lambda row: row.config,
        "equal hw": lambda row: blocks.equal_hardware(row.config),
        "drafted, wasted": _drafted,
        "accepted by source": _accepted,
    }
    tables = [
        table("Configurations", rows, HEADS, legend, own),
        _by_group("Speedup", blocks, lambda row: row.speedup),
        _by_group("Accept length", blocks, lambda row: row.figures.accept_len),
    ]
    return Report("Queue speculation", _headline(blocks), tables, METHOD, charts=charts)


def _by_group(name: str, blocks: Blocks, figure: Callable[[Row], object]) -> Table:
    """A line for each configuration, with its figure in each group."""

    def cell(group: str) -> Callable[[Row], object]:
        def of_group(row: Row) -> object:
            found = blocks.by_group.row(row.config, {"group": group})
            return None if found is None else figure(found)

        return of_group

    first = {name.lower(): COLUMNS["config"]}
    columns = first | {group: cell(group) for group in blocks.groups}
    return Table.of(f"{name} by group", blocks.every.rows, columns)


def _headline(blocks: Blocks) -> str:
    speedups = [(row.speedup, row.config) for row in blocks.every.rows if row.speedup is not None]
    parts = []
    if speedups:
        best, config = max(speedups, key=lambda found: found[0].median)
        parts.append(f"Most tokens per second: {config}, {best} × no speculation.")
    equal = blocks.equal_hardware(LARGEST)
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
