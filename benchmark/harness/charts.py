"""Draws charts with matplotlib as SVG text, and imports matplotlib only to draw a chart.

The same data give the same small file: text stays text, ids have a fixed salt, and the file has no
date. The background is transparent, and the colors are readable on white and on dark pages.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Collection, Mapping
from typing import Any

WIDTH, HEIGHT = 7.0, 3.6
"""Size of a chart, in inches; a page shows its width in about 700 pixels."""
GREY, RED = "#6e7681", "#e5484d"
COLORS = ("#2f81f7", "#d9730d", "#0d9488", "#a855f7", RED)
COLORED = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
)
STYLE: dict[str, Any] = {
    **COLORED,
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "sglang-qspec",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "savefig.transparent": True,
}
"""Settings of matplotlib."""

Panels = Mapping[str, Mapping[str, Mapping[float, float]]]
"""Panels by title; a panel has lines by name, and a line has values by x."""


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(
    panels: Panels,
    x_axis: str,
    y_axis: str = "",
    *,
    colors: Mapping[str, str] | None = None,
    reference: float | None = None,
    marks: Collection[float] = (),
    stacked: bool = False,
) -> str:
    """Panels of lines: side by side with one y axis, or `stacked` with one x axis, which is time.

    Side by side, x is on a logarithmic scale with a tick at each number. `reference` is a dashed
    horizontal line, `marks` are vertical lines.
    """
    figure, several = _chart(len(panels), stacked)
    numbers = sorted({n for named in panels.values() for line in named.values() for n in line})
    handles: dict[str, Any] = {}
    for axes, (title, named) in zip(several, panels.items(), strict=True):
        for name, points in named.items():
            places, values = zip(*sorted(points.items()), strict=True)
            style: dict[str, Any] = {"label": name}
            style |= {"color": colors[name]} if colors else {}
            style |= {"marker": "o", "markersize": 4} if not stacked else {"linewidth": 1.2}
            (handles[name],) = axes.plot(places, values, **style)
        for place in marks:
            axes.axvline(place, color=RED, linewidth=0.8)
        if reference is not None:
            axes.axhline(reference, color=GREY, linestyle="--", linewidth=1)
        axes.set_title(title, loc="left")
        axes.set_ylim(bottom=0)
        if not stacked:
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
            axes.minorticks_off()
            axes.set_xlabel(x_axis)
        else:
            axes.legend(ncols=5, loc="lower right")
    several[0].set_ylabel(y_axis)
    if stacked:
        several[-1].set_xlabel(x_axis)
    elif len(handles) > 1:
        where = {"ncols": min(5, len(handles)), "loc": "outside upper center"}
        figure.legend(handles.values(), handles.keys(), **where)
    return _svg(figure)


def _chart(panels: int, stacked: bool) -> tuple[Any, list[Any]]:
    import matplotlib as mpl

    # Not pyplot, which keeps figures and looks for a display.
    from matplotlib.figure import Figure

    mpl.rcParams.update(STYLE)
    height = 1.8 * panels if stacked else HEIGHT
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    shape = (panels, 1) if stacked else (1, panels)
    several = figure.subplots(*shape, sharex=stacked, sharey=not stacked, squeeze=False)
    for axes in several.flat:
        axes.grid(axis="y")
    return figure, list(several.flat)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    return "\n".join(map(str.rstrip, buffer.getvalue().splitlines())) + "\n"
