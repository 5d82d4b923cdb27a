"""The table on the terminal, the tables in Markdown, and the report as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from benchmark.parallel.comparisons import Comparison, Comparisons
from benchmark.parallel.measures import Row
from benchmark.parallel.plan import DESCRIPTIONS
from benchmark.parallel.targets import Target

COLUMNS = (
    "k",
    "in flight",
    "tokens/s",
    "decoding",
    "speedup",
    "equal hw",
    "mean lat. (s)",
    "p99 lat. (s)",
    "ITL (ms)",
    "p99 ITL (ms)",
    "accept length",
    "hidden",
    "V (ms)",
    "D (ms)",
    "waited (ms)",
    "identical",
    "others",
    "passes by",
)
DISTURBED_SHARE = 0.1
"""Of all processors, taken by others, above which a cell's figures are doubtful."""
COMPARED = ("k", "in flight", "ratio", "with prompts", "bound", "of bound", "V (ms)", "D (ms)")

METHOD = """A block is some prompts, a number of requests in flight and a k, the most draft tokens
of a request in a pass. All configurations serve a block one after another, and the order turns
around from round to round. All pipelines run on one server with one sidecar, set to another
pipeline between cells; servers that do not serve are stopped. A cell's prompts are sent at once
to a server with an empty cache, so that what is not in flight waits in its queue, and answers have
one length. Tokens/s are all tokens over all the time, and decoding leaves out the time in which
prompts are read and the token that each of these passes gives. Latencies count from a request's
arrival. Inter-token latencies (ITL) are of rounds of their own, in which answers are streamed,
without none-equal, whose target leaves the client no core. V is a verify pass without waits, D the
sidecar's drafting for it, and hidden the share of D that the target did not wait for. sequential,
sequential-half, halves and ahead verify k draft tokens of each request in every pass, from steps
alone; auto and queue as many as should pay. Identical is the share of requests whose greedy output
is that of no speculation; in bfloat16 kernels of different shapes may break ties differently.
Others is the share of all processors that went to anything but the server, its sidecar and the
client: where it is not near 0 something else disturbed the cell. Figures are medians over rounds,
and ratios medians of the ratios of each round."""


@dataclass(frozen=True)
class Report:
    """All that is shown."""

    rows: Sequence[Row]
    comparisons: Comparisons
    targets: Sequence[Target]
    failed: Mapping[str, str]
    """Why configurations were left out."""

    @property
    def compared(self) -> dict[str, Sequence[Comparison]]:
        """Tables of comparisons by title."""
        return {
            "halves with 2m in flight over sequential with m": self.comparisons.paper,
            "over sequential, with the same in flight": self.comparisons.same_in_flight,
        }

    @property
    def choices(self) -> list[list[str]]:
        """Cells of the table of what `auto` chose."""
        return [
            [c.config, str(c.k), str(c.in_flight), c.best, f"{c.ratio:.2f}", f"{c.whole_ratio:.2f}"]
            for c in self.comparisons.choices
        ]

    @property
    def disturbed(self) -> str:
        """A sentence about cells beside which something else ran; empty if there are none."""
        found = [
            f"{row.cell.config}, k = {row.cell.k or '–'}, {row.running} in flight"
            for row in self.rows
            if row.figures.others_share > DISTURBED_SHARE
        ]
        if not found:
            return ""
        return (
            f"Do not trust {len(found)} of {len(self.rows)} cells, beside which others took more "
            f"than {DISTURBED_SHARE:.0%} of the processors: {'; '.join(found)}."
        )


CHOICE_HEAD = ("", "k", "in flight", "best other", "ratio", "with prompts")


def table(report: Report) -> str:
    """For the terminal; the targets come last."""
    parts = ["\n".join(text_table([["", *COLUMNS], *map(_cells, report.rows)]))]
    for title, found in report.compared.items():
        if found:
            lines = text_table([["", *COMPARED], *map(_compared, found)])
            parts.append("\n".join([f"{title}:", *lines]))
    if report.choices:
        parts.append("\n".join(text_table([CHOICE_HEAD, *report.choices])))
    parts += [f"{one.verdict}: {one.goal}\n    {one.found}" for one in report.targets]
    parts += [f"{name}: failed: {reason}" for name, reason in report.failed.items()]
    parts += [report.disturbed] if report.disturbed else []
    return "\n\n".join(parts)


def markdown(report: Report) -> str:
    """The same tables, for a text file."""
    parts = [markdown_table(["", *COLUMNS], [_cells(row) for row in report.rows])]
    for title, found in report.compared.items():
        if found:
            parts.append(markdown_table([title, *COMPARED], [_compared(one) for one in found]))
    if report.choices:
        parts.append(markdown_table(CHOICE_HEAD, report.choices))
    lines = [[one.goal, one.verdict, one.found] for one in report.targets]
    parts.append(markdown_table(["target", "", "measured"], lines))
    return "\n".join(parts)


def page(report: Report, drawn: Sequence[Figure], facts: Mapping[str, str]) -> str:
    """The report. `drawn` are its figures, and `facts` what was run and where, by name."""
    missing = f"<p>The figures need matplotlib: {escape(INSTALL)}, then --report-only.</p>"
    served = dict.fromkeys(row.cell.config for row in report.rows)
    legend = "; ".join(f"{name}: {DESCRIPTIONS[name]}" for name in served)
    failures = "".join(
        f"<p>{escape(name)} failed: {escape(reason)}</p>" for name, reason in report.failed.items()
    )
    body = f"""<p>{escape(report.disturbed)}</p>
<h2>Targets</h2>
{_targets(report.targets)}
<h2>Configurations</h2>
{_table(["", *COLUMNS], [_cells(row) for row in report.rows])}
<p>{escape(legend)}.</p>
{failures}
{"".join(_comparison(title, found) for title, found in report.compared.items())}
<h2>The server's own choice, over the best of the others</h2>
{_table(CHOICE_HEAD, report.choices)}
{"".join(map(figure_html, drawn)) or missing}
<h2>How it was measured</h2>
<p>{escape(METHOD)}</p>
{facts_html(facts)}"""
    return document("Batch-parallel speculation", body)


def _targets(targets: Sequence[Target]) -> str:
    rows = [
        f'<tr><td class="fact">{escape(one.goal)}</td><td>{escape(one.verdict)}</td>'
        f'<td class="fact">{escape(one.found)}</td></tr>'
        for one in targets
    ]
    return table_html([row_html(["target", "", "measured"], "th"), *rows])


def _comparison(title: str, found: Sequence[Comparison]) -> str:
    heading = f"<h2>{escape(title[0].upper() + title[1:])}</h2>"
    return f"{heading}\n{_table(['', *COMPARED], [_compared(one) for one in found])}\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return table_html([row_html(head, "th"), *map(row_html, lines)])


def _cells(row: Row) -> list[str]:
    """Of a configuration and COLUMNS."""
    figures, streamed = row.figures, row.streamed
    return [
        row.cell.config,
        "–" if row.cell.k is None else str(row.cell.k),
        str(row.running),
        f"{figures.tokens_per_s:.1f}",
        f"{figures.decode_tokens_per_s:.1f}",
        _number(row.speedup),
        _number(row.equal_hardware),
        f"{figures.latency_mean:.2f}",
        f"{figures.latency_p99:.2f}",
        _milliseconds(streamed.itl_mean if streamed else None),
        _milliseconds(streamed.itl_p99 if streamed else None),
        f"{figures.accept_len:.2f}",
        _share(figures.hidden_share),
        _milliseconds(figures.verify_s),
        _milliseconds(figures.draft_s),
        _milliseconds(figures.waited_s),
        _share(row.identical),
        _share(figures.others_share),
        ", ".join(f"{name} {share:.0%}" for name, share in row.used.items()) or "–",
    ]


def _compared(one: Comparison) -> list[str]:
    """Of a pipeline and COMPARED."""
    return [
        one.pipeline,
        str(one.k),
        str(one.in_flight),
        f"{one.ratio:.2f}",
        f"{one.whole_ratio:.2f}",
        f"{one.bound:.2f}",
        f"{one.of_bound:.0%}",
        _milliseconds(one.verify_s),
        _milliseconds(one.draft_s),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"
