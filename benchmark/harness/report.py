"""Writes reports: tables for a terminal, a Markdown page that shows the figure files, and HTML.

The HTML page is one file that needs no network. It has the charts of `qspec show`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Literal, TypeVar

from benchmark.harness import charts
from benchmark.harness.statistics import SPREADS, number
from sglang_qspec.tools.picture import INSTALL
from sglang_qspec.tools.show.document import document
from sglang_qspec.tools.table import aligned

Row = TypeVar("Row")
Point = tuple[str, str, float, float | None]
"""Panel, line, x and y of a point; a single panel has no name."""
HTML = "report.html"
"""File of the HTML page."""


@dataclass(frozen=True)
class Figure:
    """A chart and its texts."""

    name: str
    """File name without the suffix."""
    title: str
    caption: str
    svg: str | None
    """None if the run has no data for the chart."""

    def markdown(self) -> str:
        drawing = f"![{self.title}]({self.name}.svg)"
        if self.svg is None:
            drawing = "None of the configurations that this figure shows was served."
        return f"## {self.title}\n\n{drawing}\n\n{self.caption}\n"


def line_figure(
    name: str,
    title: str,
    caption: str,
    points: Iterable[Point],
    axes: tuple[str, str],
    **style: Any,
) -> tuple[Figure, ...]:
    """A figure of lines; empty without matplotlib.

    A point whose y is None is left out. `axes` are the labels of both axes, and `style` are further
    arguments of `charts.lines`.
    """
    if not charts.available():
        return ()
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for panel, line, x, y in points:
        if y is not None:
            panels.setdefault(panel, {}).setdefault(line, {})[x] = y
    svg = charts.lines(panels, *axes, **style) if panels else None
    return (Figure(name, title, caption, svg),)


@dataclass(frozen=True)
class Chart:
    """A chart of the HTML page, and its texts."""

    title: str
    caption: str
    kind: Literal["boxes", "lines", "dots"]
    options: Mapping[str, Any] | None
    """What the chart shows, as show/static/charts.js describes it; None without data."""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""
    """A paragraph below the table."""
    is_prose: bool = False
    """Whether cells hold sentences; a terminal then shows one paragraph per line."""

    @classmethod
    def of(
        cls,
        title: str,
        rows: Iterable[Row],
        columns: Mapping[str, Callable[[Row], object]],
        note: str = "",
    ) -> Table:
        """A line for each of `rows`; `columns` are the cells of a row by their head."""
        lines = [[number(cell(row)) for cell in columns.values()] for row in rows]
        return cls(title, tuple(columns), lines, note)

    def text(self) -> str:
        """For a terminal: columns of equal width, the first aligned to the left."""
        if self.is_prose:
            return "\n".join(": ".join(filter(None, line)) for line in self.lines)
        rows = aligned([self.head, *self.lines])
        return "\n".join([f"{self.title}:", rows, *filter(None, [self.note])])

    def markdown(self) -> str:
        rule = ["---"] * len(self.head)
        rows = "\n".join(f"| {' | '.join(line)} |" for line in (self.head, rule, *self.lines))
        return f"## {self.title}\n\n{rows}\n\n{self.note}\n"


def fields(*names: str) -> dict[str, Callable[[Mapping[str, Any]], object]]:
    """Columns for rows that are mappings, each with the name of its field as the head."""
    return {name: methodcaller("get", name) for name in names}


@dataclass(frozen=True)
class Report:
    """The tables, figures and texts of a benchmark."""

    title: str
    headline: str
    """A paragraph at the top; it may be empty."""
    tables: Sequence[Table]
    method: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was run and where, by name."""
    figures: Sequence[Figure] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the session left configurations out, by configuration."""
    charts: Sequence[Chart] = ()
    """Charts of the HTML page; without them the report has none."""

    @property
    def failures(self) -> list[str]:
        return [f"{name}: failed: {why}" for name, why in self.failed.items()]

    def text(self) -> str:
        """For a terminal."""
        tables = [table.text() for table in self.tables if table.lines]
        return "\n\n".join([*tables, *filter(None, [self.headline]), SPREADS, *self.failures])

    def markdown(self) -> str:
        """The page; it refers to the figures as files of the same folder."""
        figures = [figure.markdown() for figure in self.figures]
        if self.charts:
            figures = [f"[{HTML}]({HTML}) has the charts.\n"]
        facts = (f"    {name}: {json.dumps(value)}" for name, value in self.facts.items())
        parts = [
            f"# {self.title}\n",
            f"{self.headline}\n",
            *(table.markdown() for table in self.tables),
            *(f"{failure}\n" for failure in self.failures),
            *(figures or [f"The figures need matplotlib: {INSTALL}, then --report-only.\n"]),
            f"## Method\n\n{self.method} {SPREADS}\n",
            "\n".join(facts),
        ]
        return "\n".join(parts) + "\n"

    def html(self) -> str:
        """The page with charts and tables, as one file."""
        data = {
            "title": self.title,
            "headline": self.headline,
            "charts": [vars(chart) for chart in self.charts],
            "tables": [vars(table) for table in self.tables if table.lines],
            "failures": self.failures,
            "method": f"{self.method} {SPREADS}",
            "facts": [(name, json.dumps(value)) for name, value in self.facts.items()],
        }
        return document(self.title, ("dom.js", "charts.js", "report.js"), data)
