"""Reports: one HTML file that needs nothing but itself, and tables in Markdown."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

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


@dataclass(frozen=True)
class Figure:
    """`png` is None if no configuration was served that the figure shows."""

    name: str
    """Of a file, without its suffix."""
    title: str
    caption: str
    png: bytes | None


def document(title: str, body: str) -> str:
    """A page around `body`, which is HTML; `title` is text."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def figure_html(figure: Figure) -> str:
    """With its title and caption; the image is part of the page."""
    drawing = "<p>None of the configurations that this figure shows was served.</p>"
    if figure.png is not None:
        data = base64.b64encode(figure.png).decode()
        drawing = f'<img alt="{escape(figure.title)}" src="data:image/png;base64,{data}">'
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<h2>{escape(figure.title)}</h2>\n<figure>{drawing}\n{caption}</figure>\n"


def facts_html(facts: Mapping[str, str]) -> str:
    """A table of what was run and where, by name."""
    rows = (
        f'<tr><td>{escape(name)}</td><td class="fact"><pre>{escape(value)}</pre></td></tr>'
        for name, value in facts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def table_html(rows: Sequence[str]) -> str:
    """Of rows in HTML; it scrolls where it is wider than the page."""
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def row_html(cells: Sequence[str], tag: str = "td") -> str:
    """Of a table; the cells are text."""
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Ends with a line feed."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def text_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """For a terminal: columns of equal width, of which the first is aligned to the left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
