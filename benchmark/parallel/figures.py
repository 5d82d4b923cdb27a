"""The figures of `bench_batch_parallel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmark.harness import charts
from benchmark.harness.report import Figure
from benchmark.parallel.comparisons import Comparison, Comparisons
from benchmark.parallel.measures import Point, Results, known
from benchmark.parallel.plan import (
    AHEAD,
    AUTO,
    AUTO_STEP,
    BASELINE,
    BASELINE_ALL_CORES,
    BASELINES,
    HALVES,
    QUEUE,
    SEQUENTIAL,
    SEQUENTIAL_HALF,
)

BOUND = "(V + D) / max(V, D)"
VERIFY, DRAFT = "V, verifying", "D, drafting"
COLORS = {
    BASELINE: "#94a3b8",
    BASELINE_ALL_CORES: "#475569",
    SEQUENTIAL: "#b45309",
    SEQUENTIAL_HALF: "#e0a458",
    HALVES: "#2f6fb7",
    AHEAD: "#0f766e",
    QUEUE: "#a855f7",
    AUTO: "#be123c",
    AUTO_STEP: "#f472b6",
    BOUND: "#64748b",
    VERIFY: "#2f6fb7",
    DRAFT: "#b45309",
}

Lines = Mapping[str, Mapping[int, float]]
"""By name: values by requests in flight."""
Panels = Mapping[str, Lines]


def figures(results: Results, comparisons: Comparisons) -> tuple[Figure, ...]:
    """All figures; none without matplotlib."""
    if not charts.available():
        return ()
    shown = [name for name in results.configs if name != SEQUENTIAL_HALF]
    hiding = [name for name in (SEQUENTIAL, HALVES, AHEAD, AUTO_STEP) if name in results.configs]
    return (
        _figure(
            "tokens_per_s",
            "Tokens per second",
            "All tokens of a cell over all its time, the prompts' passes included, by requests in "
            "flight; a panel for each k, the most draft tokens of a request in a pass. Dashed: no "
            "speculation.",
            _panels(results, dict.fromkeys(shown, "tokens_per_s")),
            "tokens/s",
        ),
        _figure(
            "hidden_share",
            "Hidden drafting",
            "Of the time that the sidecar drafted for running requests, the share that the target "
            "did not wait for.",
            _panels(results, dict.fromkeys(hiding, "hidden_share")),
            "share hidden",
        ),
        _figure(
            "paper_comparison",
            "Halves with 2m requests in flight over sequential with m",
            "Decoded tokens per second, by the requests in flight of the halves (2m). Dashed: the "
            "ratio if all drafting were hidden, with V and D of m requests.",
            _ratios(results, comparisons.paper),
            "ratio",
        ),
        _figure(
            "same_in_flight",
            "Halves and ahead over sequential, with the same requests in flight",
            "Decoded tokens per second. Dashed: the ratio if all drafting were hidden, with V and "
            "D of all requests at once.",
            _ratios(results, comparisons.same_in_flight),
            "ratio",
        ),
        _figure(
            "verify_and_draft",
            "Verifying and drafting",
            "Of sequential: a verify pass without waits, and the drafting for it.",
            _times(results),
            "ms",
        ),
        _figure(
            "inter_token_latency",
            "Inter-token latency",
            "From token to token of streamed answers; tokens that come in one piece share the time "
            "since the piece before it.",
            _inter_token(results),
            "ms",
        ),
    )


def _figure(name: str, title: str, caption: str, panels: Panels, axis: str) -> Figure:
    shown = {
        panel: {line: points for line, points in lines.items() if points}
        for panel, lines in panels.items()
    }
    shown = {panel: lines for panel, lines in shown.items() if lines}
    png = None
    if shown:
        dashed = (BOUND, *BASELINES)
        png = charts.lines_by_number(shown, "requests in flight", axis, COLORS, dashed)
    return Figure(name, title, caption, png)


def _panels(results: Results, figure_of: Mapping[str, str]) -> Panels:
    """A panel for each k, in which the baselines are the same."""

    def line(name: str, k: int, figure: str) -> dict[int, float]:
        found = None if name in BASELINES else k
        points = (Point(level, found, name) for level in results.levels)
        return known(map(results.row, points), lambda row: getattr(row.figures, figure))

    return {
        f"k = {k}": {name: line(name, k, figure) for name, figure in figure_of.items()}
        for k in results.ks
    }


def _ratios(results: Results, comparisons: Iterable[Comparison]) -> Panels:
    panels: dict[str, dict[str, dict[int, float]]] = {f"k = {k}": {} for k in results.ks}
    for one in comparisons:
        lines = panels[f"k = {one.k}"]
        lines.setdefault(one.pipeline, {})[one.in_flight] = one.ratio.median
        lines.setdefault(BOUND, {})[one.in_flight] = one.bound
    return dict(panels)


def _times(results: Results) -> Panels:
    panels = {}
    for k in results.ks:
        rows = [results.row(Point(level, k, SEQUENTIAL)) for level in results.levels]
        lines = {
            VERIFY: known(rows, lambda row: row.figures.verify_s),
            DRAFT: known(rows, lambda row: row.figures.draft_s),
        }
        panels[f"k = {k}"] = {
            name: {number: 1e3 * seconds for number, seconds in points.items()}
            for name, points in lines.items()
        }
    return panels


def _inter_token(results: Results) -> Panels:
    panels: dict[str, dict[str, dict[int, float]]] = {"mean": {}, "99th percentile": {}}
    for row in results.rows():
        if row.streamed is not None and row.point.config != SEQUENTIAL_HALF:
            values = (row.streamed.itl_mean, row.streamed.itl_p99)
            for panel, value in zip(panels.values(), values, strict=True):
                panel.setdefault(row.point.config, {})[row.running] = 1e3 * value
    return dict(panels)
