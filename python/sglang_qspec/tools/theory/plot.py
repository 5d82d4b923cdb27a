"""A plot of predicted against measured throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_qspec.tools import picture
from sglang_qspec.tools.theory.fit import PredictedResult

BAND = 0.15
"""Relative error of the shaded band, within which a prediction counts as near."""


def write(predicted: Sequence[PredictedResult], path: Path) -> None:
    """Write a PNG with one point per prediction, on the diagonal if it is exact."""
    rates = [rate for each in predicted for rate in (each.result.tokens_per_s, each.estimate.rate)]
    ends = [0.9 * min(rates), 1.1 * max(rates)]
    with picture.axes("--plot", path, (6.4, 5.6), "png") as axes:
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
        for pipeline in dict.fromkeys(each.result.pipeline for each in predicted):
            points = [each for each in predicted if each.result.pipeline == pipeline]
            axes.scatter(
                [each.result.tokens_per_s for each in points],
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
