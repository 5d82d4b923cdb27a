"""A picture of throughput against latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_qspec.tools import picture
from sglang_qspec.tools.plan.planner import Plan


def write(lines: Mapping[str, Sequence[Plan]], path: Path, title: str) -> None:
    """Write an SVG or PNG with a line for each of `lines`, and the slots at each point.

    Raises ConfigError if matplotlib is missing or the file cannot be written.
    """
    with picture.axes("--sweep", path, (6.4, 4.4), path.suffix[1:]) as axes:
        for name, plans in lines.items():
            points = [(plan.figures.service, plan.rate) for plan in plans]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
            for plan, point in zip(plans, points, strict=True):
                offset = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": 7}
                axes.annotate(str(plan.group.slots), point, **offset)
        axes.set_xlabel("mean seconds from admission to the end of an answer (labels: slots)")
        axes.set_ylabel("output tokens per second")
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=9)
