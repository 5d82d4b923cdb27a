"""The table on the terminal, and the report: one HTML file that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from benchmark.harness.charts import INSTALL
from benchmark.harness.report import (
    Figure,
    document,
    facts_html,
    figure_html,
    markdown_table,
    row_html,
    table_html,
    text_table,
)
from benchmark.queueing.configurations import DESCRIPTIONS
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
)


def table(summary: Summary) -> str:
    """For the terminal; configurations that failed come last, with the reason."""
    lines = [["", *COLUMNS], *([row.config, *_cells(row)] for row in summary.rows)]
    text = text_table(lines)
    text += [
        f"{row.config}: accepted draft tokens by source: {shares}"
        for row in summary.rows
        if (shares := _shares(row.overall.accepted))
    ]
    return "\n".join(text + [f"{fail.config}: failed: {fail.reason}" for fail in summary.failures])


def markdown(summary: Summary) -> str:
    """The tables of the report, for a text file: the configurations, and speedups by group."""
    groups = list(summary.rows[0].by_group) if summary.rows else []
    overall = [[row.config, *_cells(row), _shares(row.overall.accepted)] for row in summary.rows]
    speedups = [
        [row.config, *(_number(row.by_group[group].speedup) for group in groups)]
        for row in summary.rows
    ]
    lengths = [
        [row.config, *(_number(row.by_group[group].accept_len) for group in groups)]
        for row in summary.rows
    ]
    return "\n".join(
        markdown_table(head, lines)
        for head, lines in (
            (["", *COLUMNS, "accepted by source"], overall),
            (["speedup", *groups], speedups),
            (["accept length", *groups], lengths),
        )
    )


def page(summary: Summary, drawn: Sequence[Figure], facts: Mapping[str, str]) -> str:
    """The report. `drawn` are its figures, and `facts` what was run and where, by name."""
    missing = f"<p>The figures need matplotlib: {escape(INSTALL)}, then --report-only.</p>"
    body = f"""<p>{escape(_headline(summary))}</p>
<h2>Configurations</h2>
{_overview(summary)}
<h2>Speedup by group</h2>
{_groups(summary.rows)}
{"".join(map(figure_html, drawn)) or missing}
<h2>How it was measured</h2>
<p>A block is some prompts of one group, sent as one queue into a server with empty caches. All
configurations serve a block, one after another, before the next block, and the order turns around
from block to block; whoever does not serve is stopped. Tokens/s are all tokens over the time of
all blocks, and the speedup is theirs over <code>none</code>. Equal hardware (hw) compares, on the
cores of target and sidecar together, the configuration with no speculation. Latencies count from
a request's arrival. The accept length is output tokens per target pass after the prompt's; passes
per token include the prompt's. Wasted are tokens that the sidecar drafted and no pass accepted.
Identical is the share of requests whose greedy output is that of <code>none</code>; in bfloat16
kernels of different shapes may break ties differently. With several rounds the tables show
medians over them, and the points of the figures are the requests of all rounds.</p>
{facts_html(facts)}"""
    return document("Queue speculation", body)


def _headline(summary: Summary) -> str:
    speedups = [(row.overall.speedup, row.config) for row in summary.rows if row.overall.speedup]
    parts = []
    if speedups:
        speedup, config = max(speedups)
        parts.append(f"Most tokens per second: {config}, {speedup:.2f} × no speculation.")
    if summary.equal_hardware_speedup is not None:
        parts.append(
            f"Against no speculation on the same cores, qspec-8 has "
            f"{summary.equal_hardware_speedup:.2f} × the tokens per second."
        )
    return " ".join(parts)


def _overview(summary: Summary) -> str:
    rows = [
        row_html([row.config, *_cells(row), _shares(row.overall.accepted) or "–"])
        for row in summary.rows
    ]
    rows += [
        f"<tr><td>{escape(fail.config)}</td>"
        f'<td class="reason" colspan="{len(COLUMNS) + 1}">{escape(fail.reason)}</td></tr>'
        for fail in summary.failures
    ]
    legend = "; ".join(f"{row.config}: {DESCRIPTIONS[row.config]}" for row in summary.rows)
    head = row_html(["", *COLUMNS, "accepted by source"], "th")
    return f"{table_html([head, *rows])}<p>{escape(legend)}.</p>"


def _groups(rows: Sequence[Row]) -> str:
    groups = list(rows[0].by_group) if rows else []
    lines = [
        row_html([row.config, *(_number(row.by_group[group].speedup) for group in groups)])
        for row in rows
    ]
    head = row_html(["", *groups], "th")
    return table_html([head, *lines])


def _cells(row: Row) -> list[str]:
    """Of COLUMNS."""
    measures = row.overall
    wasted = "–"
    if measures.drafted is not None and measures.wasted is not None:
        wasted = f"{measures.drafted:.0f}, {measures.wasted:.0f}"
    return [
        f"{measures.tokens_per_s:.1f}",
        _number(measures.speedup),
        _number(row.equal_hardware_speedup),
        f"{measures.mean_latency:.2f}",
        f"{measures.p99_latency:.2f}",
        f"{measures.accept_len:.2f}",
        _number(measures.match_rate),
        _number(measures.passes_per_token),
        wasted,
        "–" if measures.identical is None else f"{measures.identical:.0%}",
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _shares(accepted: Mapping[str, int]) -> str:
    total = sum(accepted.values())
    return ", ".join(f"{name} {n / total:.0%}" for name, n in accepted.items() if n)
