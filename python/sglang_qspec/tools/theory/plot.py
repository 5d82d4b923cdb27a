"""A plot of predicted against measured throughput; matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_qspec.errors import TheoryError
from sglang_qspec.tools.theory.fit import Comparison

INSTALL = "pip install 'sglang-qspec[bench]'"
"""Command that installs matplotlib."""
BAND = 0.15
"""Relative error of the shaded band, within which a prediction counts as near."""


def write(compared: Sequence[Comparison], path: Path) -> None:
    """Write a PNG with one point per row, on the diagonal if the prediction is exact."""
    try:
        # Not pyplot, which keeps figures and looks for a display.
        from matplotlib.figure import Figure
    except ImportError:
        raise TheoryError(f"--plot is {path}, but matplotlib is missing: {INSTALL}") from None
    figure = Figure(figsize=(6.4, 5.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    rates = [rate for each in compared for rate in (each.row.tokens_per_s, each.estimate.rate)]
    ends = [0.9 * min(rates), 1.1 * max(rates)]
    axes.plot(ends, ends, color="#64748b", linewidth=1)
    axes.fill_between(
        ends,
        [(1 - BAND) * end for end in ends],
        [(1 + BAND) * end for end in ends],
        color="#64748b",
        alpha=0.12,
        linewidth=0,
        label=f"within {100 * BAND:.0f} %",
    )
    for pipeline in dict.fromkeys(each.row.pipeline for each in compared):
        points = [each for each in compared if each.row.pipeline == pipeline]
        axes.scatter(
            [each.row.tokens_per_s for each in points],
            [each.estimate.rate for each in points],
            s=26,
            marker="x" if points[0].fitted else "o",
            label=f"{pipeline} (fitted)" if points[0].fitted else pipeline,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("measured tokens per second")
    axes.set_ylabel("predicted tokens per second")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise TheoryError(f"--plot is {path}, but it cannot be written: {error}") from None
