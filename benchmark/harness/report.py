"""Reports: tables for a terminal and in Markdown, and one HTML file that needs no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from benchmark.harness.charts import INSTALL
from benchmark.harness.statistics import SPREADS

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
.prose td { text-align: left; white-space: normal; }
pre { background: #f8fafc; border: 1px solid #e2e8f0; padding: 10px; white-space: pre-wrap;
      overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Figure:
    """A chart with its texts."""

    name: str
    """Name of its file, without the suffix."""
    title: str
    caption: str
    png: bytes | None
    """None if no configuration was served that the figure shows."""

    def html(self) -> str:
        drawing = "<p>None of the configurations that this figure shows was served.</p>"
        if self.png is not None:
            data = base64.b64encode(self.png).decode()
            drawing = f'<img alt="{escape(self.title)}" src="data:image/png;base64,{data}">'
        caption = f"<figcaption>{escape(self.caption)}</figcaption>"
        return f"<h2>{escape(self.title)}</h2>\n<figure>{drawing}\n{caption}</figure>\n"


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""
    """A paragraph below the table."""
    is_prose: bool = False
    """Whether cells hold sentences; a terminal then shows a paragraph for each line."""

    def text(self) -> str:
        """For a terminal: columns of equal width, the first aligned to the left."""
        if self.is_prose:
            return "\n".join(": ".join(filter(None, line)) for line in self.lines)
        every = [self.head, *self.lines]
        widths = [max(len(line[column]) for line in every) for column in range(len(self.head))]
        rows = (
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in every
        )
        return "\n".join([f"{self.title}:", *rows, *filter(None, [self.note])])

    def markdown(self) -> str:
        """Ends with a line feed."""
        rule = ["---"] * len(self.head)
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.head, rule, *self.lines))

    def html(self) -> str:
        rows = [_row(self.head, "th"), *(_row(line, "td") for line in self.lines)]
        kind = ' class="prose"' if self.is_prose else ""
        return (
            f"<h2>{escape(self.title)}</h2>\n"
            f'<div class="scroll"><table{kind}>{"".join(rows)}</table></div>\n'
            f"<p>{escape(self.note)}</p>\n"
        )


@dataclass(frozen=True)
class Report:
    """All that a benchmark shows."""

    title: str
    headline: str
    """A paragraph at the top; it may be empty."""
    tables: Sequence[Table]
    method: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was run and where, by name."""
    figures: Sequence[Figure] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why configurations were left out, by name."""

    def text(self) -> str:
        """For a terminal."""
        tables = [table.text() for table in self.tables if table.lines]
        failures = [f"{name}: failed: {why}" for name, why in self.failed.items()]
        return "\n\n".join([*tables, *filter(None, [self.headline]), SPREADS, *failures])

    def markdown(self) -> str:
        """The tables, for a text file."""
        return "\n".join(table.markdown() for table in self.tables)

    def page(self) -> str:
        """One HTML file."""
        failures = "".join(
            f"<p>{escape(name)} failed: {escape(why)}</p>\n" for name, why in self.failed.items()
        )
        shown = ((n, v if isinstance(v, str) else json.dumps(v)) for n, v in self.facts.items())
        facts = "".join(
            f"<tr><td>{escape(name)}</td><td><pre>{escape(value)}</pre></td></tr>"
            for name, value in shown
        )
        missing = f"<p>The figures need matplotlib: {escape(INSTALL)}, then --report-only.</p>"
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(self.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(self.title)}</h1>
<p>{escape(self.headline)}</p>
{"".join(table.html() for table in self.tables)}
{failures}
{"".join(figure.html() for figure in self.figures) or missing}
<h2>How it was measured</h2>
<p>{escape(self.method)} {escape(SPREADS)}</p>
<table class="prose">{facts}</table>
</body>
</html>
"""


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
