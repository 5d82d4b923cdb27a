"""The table on the terminal, and the report: one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from benchmark.queueing.charts import INSTALL
from benchmark.queueing.configurations import DESCRIPTIONS
from benchmark.queueing.figures import Figure
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

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #fff; margin: 0 auto;
       max-width: 960px; padding: 32px 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 8px; }
p, figcaption { color: #475569; max-width: 76ch; } figure { margin: 0; }
img { width: 100%; max-width: 760px; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #e2e8f0;
         white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; background: #f8fafc; } th:first-child, td:first-child { text-align: left; }
td.fact { text-align: left; white-space: normal; }
td.reason { text-align: left; white-space: normal; color: #b91c1c; }
pre { background: #f8fafc; border: 1px solid #e2e8f0; padding: 10px; white-space: pre-wrap;
      overflow-wrap: anywhere; }
"""


def table(summary: Summary) -> str:
    """For the terminal; configurations that failed come last, with the reason."""
    lines = [["", *COLUMNS], *([row.config, *_cells(row)] for row in summary.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
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
        _markdown_table(head, lines)
        for head, lines in (
            (["", *COLUMNS, "accepted by source"], overall),
            (["speedup", *groups], speedups),
            (["accept length", *groups], lengths),
        )
    )


def _markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def page(summary: Summary, drawn: Sequence[Figure], facts: Mapping[str, str]) -> str:
    """The report. `drawn` are its figures, and `facts` what was run and where, by name."""
    missing = f"<p>The figures need matplotlib: {escape(INSTALL)}, then --report-only.</p>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Queue speculation</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Queue speculation</h1>
<p>{escape(_headline(summary))}</p>
<h2>Configurations</h2>
{_overview(summary)}
<h2>Speedup by group</h2>
{_groups(summary.rows)}
{"".join(map(_figure, drawn)) or missing}
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
<table>{"".join(_fact(name, value) for name, value in facts.items())}</table>
</body>
</html>
"""


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
        _table_row([row.config, *_cells(row), _shares(row.overall.accepted) or "–"])
        for row in summary.rows
    ]
    rows += [
        f"<tr><td>{escape(fail.config)}</td>"
        f'<td class="reason" colspan="{len(COLUMNS) + 1}">{escape(fail.reason)}</td></tr>'
        for fail in summary.failures
    ]
    legend = "; ".join(f"{row.config}: {DESCRIPTIONS[row.config]}" for row in summary.rows)
    head = _table_row(["", *COLUMNS, "accepted by source"], "th")
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div><p>{escape(legend)}.</p>'


def _groups(rows: Sequence[Row]) -> str:
    groups = list(rows[0].by_group) if rows else []
    lines = [
        _table_row([row.config, *(_number(row.by_group[group].speedup) for group in groups)])
        for row in rows
    ]
    head = _table_row(["", *groups], "th")
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _figure(figure: Figure) -> str:
    drawing = "<p>None of the configurations that this figure shows was served.</p>"
    if figure.png is not None:
        data = base64.b64encode(figure.png).decode()
        drawing = f'<img alt="{escape(figure.title)}" src="data:image/png;base64,{data}">'
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<h2>{escape(figure.title)}</h2>\n<figure>{drawing}\n{caption}</figure>\n"


def _fact(name: str, value: str) -> str:
    return f'<tr><td>{escape(name)}</td><td class="fact"><pre>{escape(value)}</pre></td></tr>'


def _table_row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


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
