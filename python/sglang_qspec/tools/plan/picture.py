"""A picture of throughput against latency; matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.plan.planner import Plan
from sglang_qspec.tools.theory.plot import INSTALL

SUFFIXES = (".svg", ".png")


def write(lines: Mapping[str, Sequence[Plan]], path: Path, title: str) -> None:
    """Write an SVG or PNG with a line for each of `lines`, and the slots at each point.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    try:
        # Not pyplot, which keeps figures and looks for a display.
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"--sweep is {path}, but matplotlib is missing: {INSTALL}") from None
    figure = Figure(figsize=(6.4, 4.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name, plans in lines.items():
        places = [(plan.outcome.service, plan.rate) for plan in plans]
        axes.plot(*zip(*places, strict=True), marker="o", markersize=4, label=name)
        for plan, place in zip(plans, places, strict=True):
            offset = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": 7}
            axes.annotate(str(plan.group.slots), place, **offset)
    axes.set_xlabel("mean seconds from admission to the end of an answer (labels: slots)")
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format=path.suffix[1:])
    except OSError as error:
        raise ConfigError(f"--sweep is {path}, but it cannot be written: {error}") from None
