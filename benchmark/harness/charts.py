"""Four kinds of charts with matplotlib, as PNG; it is imported only where one is drawn."""

from __future__ import annotations

import importlib.util
import io
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

INSTALL = "pip install 'sglang-qspec[bench]'"
"""The command that installs matplotlib."""
WIDTH, HEIGHT = 8.6, 4.2
"""Size of a chart, in inches."""
DOTS_PER_INCH = 130
GREY = "#64748b"


def available() -> bool:
    """Whether charts can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def distributions(
    rows: Mapping[str, Sequence[float]],
    axis: str,
    colors: Mapping[str, str],
    reference: float | None = None,
) -> bytes:
    """A row of boxes over the quartiles, with the mean as a line and every value as a point.

    The axis ends with the longest whisker (1.5 times the quartiles' distance), so that a value far
    beyond does not press the others together.
    """
    figure, (axes,) = _chart()
    places = range(1, len(rows) + 1)
    boxes = axes.boxplot(
        list(rows.values()),
        positions=list(places),
        widths=0.62,
        showfliers=False,
        showmeans=True,
        meanline=True,
        patch_artist=True,
        medianprops={"linewidth": 0},
        meanprops={"color": "black", "linestyle": "-", "linewidth": 1.6},
        whiskerprops={"color": GREY},
        capprops={"color": GREY},
    )
    spread = random.Random(0)
    for place, box, (name, values) in zip(places, boxes["boxes"], rows.items(), strict=True):
        box.set(facecolor=colors[name], alpha=0.55, edgecolor=colors[name])
        offsets = [place + spread.uniform(-0.22, 0.22) for _ in values]
        axes.scatter(offsets, values, s=7, color=colors[name], linewidths=0, alpha=0.8, zorder=3)
    axes.set_xticks(list(places), [f"{name}\nn = {len(v)}" for name, v in rows.items()], fontsize=8)
    axes.set_ylim(0, 1.05 * max(max(cap.get_ydata()) for cap in boxes["caps"]) or 1.0)
    axes.set_ylabel(axis)
    _reference(axes, reference)
    return _png(figure)


def spread_by_number(
    points: Mapping[int, Sequence[float]], x_axis: str, y_axis: str, color: str
) -> bytes:
    """Means over numbers, each with a bar over its quartiles."""
    figure, (axes,) = _chart()
    numbers = list(points)
    means = [float(np.mean(points[number])) for number in numbers]
    quartiles = [np.quantile(points[number], [0.25, 0.75]) for number in numbers]
    bars = [
        [max(0.0, mean - low) for mean, (low, _) in zip(means, quartiles, strict=True)],
        [max(0.0, high - mean) for mean, (_, high) in zip(means, quartiles, strict=True)],
    ]
    axes.errorbar(numbers, means, yerr=bars, color=color, marker="o", capsize=4, linewidth=1.8)
    for number, mean in zip(numbers, means, strict=True):
        axes.annotate(f"{mean:.2f}", (number, mean), (7, 5), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_axis)
    axes.set_ylabel(y_axis)
    _reference(axes, 1.0)
    return _png(figure)


def bars_by_group(
    series: Mapping[str, Mapping[str, float]], axis: str, colors: Mapping[str, str]
) -> bytes:
    """Groups of bars side by side, one of each series."""
    figure, (axes,) = _chart()
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [group + width * (index - (len(series) - 1) / 2) for group in range(len(groups))]
        heights = [values.get(group, 0.0) for group in groups]
        bars = axes.bar(places, heights, 0.92 * width, color=colors[name], label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(axis)
    _reference(axes, 1.0)
    axes.legend(frameon=False, ncols=len(series), loc="upper center", bbox_to_anchor=(0.5, 1.13))
    return _png(figure)


def lines_by_number(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    x_axis: str,
    y_axis: str,
    colors: Mapping[str, str],
    dashed: Collection[str] = (),
) -> bytes:
    """Panels side by side with one scale, each of lines over numbers by their name."""
    figure, several = _chart(len(panels))
    numbers = sorted({n for lines in panels.values() for line in lines.values() for n in line})
    handles: dict[str, Any] = {}
    for axes, (title, lines) in zip(several, panels.items(), strict=True):
        for name, points in lines.items():
            places, values = zip(*sorted(points.items()), strict=True)
            style = "--" if name in dashed else "-"
            (line,) = axes.plot(places, values, style, color=colors[name], marker=".")
            handles.setdefault(name, line)
        axes.set_title(title, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
        axes.set_xlabel(x_axis, fontsize=9)
    several[0].set_ylim(bottom=0)
    several[0].set_ylabel(y_axis)
    figure.legend(
        handles.values(),
        handles.keys(),
        frameon=False,
        ncols=5,
        fontsize=8,
        loc="outside upper center",
    )
    return _png(figure)


def _chart(panels: int = 1) -> tuple[Any, list[Any]]:
    # Not pyplot, which keeps figures and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DOTS_PER_INCH, layout="constrained")
    several = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    for axes in several:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0")
        axes.set_axisbelow(True)
    return figure, several


def _reference(axes: Any, value: float | None) -> None:
    if value is not None:
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
