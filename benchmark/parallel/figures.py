"""The figures of `bench_batch_parallel`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmark.harness import charts
from benchmark.harness.charts import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, Bar
from benchmark.harness.report import Figure, Point, line_figure
from benchmark.harness.summary import Row
from benchmark.parallel import plan
from benchmark.parallel.comparisons import Comparison, Comparisons, balanced
from benchmark.parallel.measures import Results

BOUND = "(V + D) / max(V, D)"
_DARK = (GREY, ORANGE, BLUE, GREEN, VIOLET, RED, GREY)
_NAMES = (plan.BASELINE_ALL_CORES, plan.SEQUENTIAL, plan.HALVES, plan.AHEAD, plan.QUEUE, plan.AUTO)
_PALE = {plan.BASELINE: "#94a3b8", plan.SEQUENTIAL_HALF: "#e0a458", plan.AUTO_STEP: "#f472b6"}
COLORS = {**dict(zip((*_NAMES, BOUND), _DARK, strict=True)), **_PALE}
TIMELINE = (plan.SEQUENTIAL, plan.AHEAD, plan.HALVES)
TARGET, SIDECAR = "target", "sidecar"
ROUNDS = 3
"""Rounds of each pipeline in the timeline."""


def figures(results: Results, comparisons: Comparisons) -> tuple[Figure, ...]:
    """All figures; none without matplotlib."""
    if not charts.available():
        return ()
    return (
        *_lines(
            "tokens_per_s",
            "Tokens per second",
            "All tokens of a cell over all its time, with prefill, by requests in flight; a panel "
            "for each k, the maximum number of draft tokens of a request in a pass. Dashed: no "
            "speculation.",
            _speeds(results),
            "tokens/s",
        ),
        *_lines(
            "paper_comparison",
            "Halves with 2m requests in flight over sequential with m",
            "Decoded tokens per second, by the requests in flight of the halves (2m). Dashed: the "
            "ratio if all drafting were hidden, with V and D of m requests.",
            _ratios(results, comparisons.paper),
            "ratio",
        ),
        *_lines(
            "same_in_flight",
            "Halves and ahead over sequential, with the same requests in flight",
            "Decoded tokens per second. Dashed: the ratio if all drafting were hidden, with V and "
            "D of all requests at once.",
            _ratios(results, comparisons.same_in_flight),
            "ratio",
        ),
        _timeline(results, comparisons),
    )


def _lines(
    name: str, title: str, caption: str, points: Iterable[Point], axis: str
) -> tuple[Figure, ...]:
    axes, dashed = ("requests in flight", axis), (BOUND, *plan.BASELINES)
    return line_figure(name, title, caption, points, axes, colors=COLORS, dashed=dashed)


def _speeds(results: Results) -> Iterator[Point]:
    """A panel for each k; the baselines are the same in all panels."""
    for k in results.ks:
        for row in results.rows:
            if row.config != plan.SEQUENTIAL_HALF and row.load.get("k", k) == k:
                yield f"k = {k}", row.config, row.load["in_flight"], row.figures.tokens_per_s


def _ratios(results: Results, comparisons: Sequence[Comparison]) -> Iterator[Point]:
    """A panel for each k."""
    for k in results.ks:
        for one in comparisons:
            if one.k == k:
                yield f"k = {k}", one.pipeline, one.in_flight, one.ratio.median
                yield f"k = {k}", BOUND, one.in_flight, one.bound


def _timeline(results: Results, comparisons: Comparisons) -> Figure:
    one = balanced(comparisons.same_in_flight)
    caption, svg = "", None
    if one is not None:
        load = {"in_flight": one.in_flight, "k": one.k}
        rows = [results.row(name, load) for name in TIMELINE]
        bars = {
            f"{row.config}: {place}": found
            for row in rows
            if row is not None
            for place, found in zip((TARGET, SIDECAR), timeline(row), strict=True)
        }
        caption = (
            f"Measured times of {one.in_flight} requests in flight and k = {one.k}: a bar of the "
            "target is a verify pass, a bar of the sidecar is the drafting for a pass. The numbers "
            "count passes; A and B are the halves of the batch."
        )
        svg = charts.timeline(bars, "milliseconds", {TARGET: BLUE, SIDECAR: ORANGE})
    return Figure("pipelines", "The pipelines", caption, svg)


def timeline(row: Row) -> tuple[list[Bar], list[Bar]]:
    """Bars for passes of the target and drafts of the sidecar, in ms, by the medians of V and D.

    The bars follow the plan of the pipeline. They omit the waits and overheads of single passes.
    """
    verify, draft = 1e3 * (row.figures.verify_s or 0.0), 1e3 * (row.figures.draft_s or 0.0)
    is_sequential = row.config == plan.SEQUENTIAL
    period = verify + draft if is_sequential else max(verify, draft)
    passes, drafts = [], []
    for number in range(ROUNDS * 2 if row.config == plan.HALVES else ROUNDS):
        text = str(number + 1)
        if row.config == plan.HALVES:
            text = f"{'AB'[number % 2]}{number // 2 + 1}"
        drafts.append(Bar(number * period, draft, text))
        begin = number * period + draft if is_sequential else (number + 1) * period
        passes.append(Bar(begin, verify, text))
    return passes, drafts
