"""The figures of batch-parallel speculation, as PNG with a title and a caption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmark.harness import charts
from benchmark.harness.report import Figure
from benchmark.parallel.comparisons import Comparison, Comparisons
from benchmark.parallel.measures import Point, Results, Row, known
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
IN_FLIGHT = "requests in flight"

Lines = Mapping[str, Mapping[int, float]]
"""By name: values by requests in flight."""
Value = Callable[[Row], float | None]


def figures(results: Results, comparisons: Comparisons) -> tuple[Figure, ...]:
    """All figures; none without matplotlib."""
    if not charts.available():
        return ()
    return (
        _throughput(results),
        _hidden(results),
        _paper(results, comparisons),
        _same_in_flight(results, comparisons),
        _times(results),
        _inter_token(results),
    )


def _throughput(results: Results) -> Figure:
    names = [name for name in results.configs if name != SEQUENTIAL_HALF]
    return Figure(
        "tokens_per_s",
        "Tokens per second",
        "All tokens of a cell over all its time, the prompts' passes included, by requests in "
        "flight; a panel for each k, the most draft tokens of a request in a pass. Dashed: no "
        "speculation.",
        _draw(_panels(results, names, lambda row: row.figures.tokens_per_s), "tokens/s"),
    )


def _hidden(results: Results) -> Figure:
    names = [name for name in (SEQUENTIAL, HALVES, AHEAD, AUTO_STEP) if name in results.configs]
    return Figure(
        "hidden_share",
        "Hidden drafting",
        "Of the time that the sidecar drafted for served requests, the share that the target did "
        "not wait for.",
        _draw(_panels(results, names, lambda row: row.figures.hidden_share), "share hidden"),
    )


def _paper(results: Results, comparisons: Comparisons) -> Figure:
    return Figure(
        "paper_comparison",
        "Halves with 2m requests in flight over sequential with m",
        "Decoded tokens per second, by the requests in flight of the halves (2m). Dashed: what "
        "hiding all drafting would give, with V and D of m requests.",
        _draw(_ratios(results, comparisons.paper), "ratio"),
    )


def _same_in_flight(results: Results, comparisons: Comparisons) -> Figure:
    return Figure(
        "same_in_flight",
        "Halves and ahead over sequential, with the same requests in flight",
        "Decoded tokens per second. Dashed: what hiding all drafting would give, with V and D of "
        "all requests at once.",
        _draw(_ratios(results, comparisons.same_in_flight), "ratio"),
    )


def _times(results: Results) -> Figure:
    panels: dict[str, Lines] = {}
    for k in results.ks:
        rows = [results.row(Point(level, k, SEQUENTIAL)) for level in results.levels]
        panels[f"k = {k}"] = {
            VERIFY: _milliseconds(rows, lambda row: row.figures.verify_s),
            DRAFT: _milliseconds(rows, lambda row: row.figures.draft_s),
        }
    return Figure(
        "verify_and_draft",
        "Verifying and drafting",
        "Of sequential: a verify pass without waits, and the drafting for it.",
        _draw(panels, "ms"),
    )


def _inter_token(results: Results) -> Figure:
    panels: dict[str, dict[str, dict[int, float]]] = {"mean": {}, "99th percentile": {}}
    for row in results.rows():
        if row.streamed is not None and row.point.config != SEQUENTIAL_HALF:
            values = (row.streamed.itl_mean, row.streamed.itl_p99)
            for panel, value in zip(panels.values(), values, strict=True):
                panel.setdefault(row.point.config, {})[row.running] = 1e3 * value
    return Figure(
        "inter_token_latency",
        "Inter-token latency",
        "From token to token of streamed answers; tokens that come in one piece share the time "
        "since the piece before it.",
        _draw(panels, "ms"),
    )


def _panels(results: Results, names: Sequence[str], value: Value) -> dict[str, Lines]:
    """A panel for each k, in which the baselines are the same."""
    panels: dict[str, Lines] = {}
    for k in results.ks:
        lines = {}
        for name in names:
            points = [
                Point(level, None if name in BASELINES else k, name) for level in results.levels
            ]
            lines[name] = known(map(results.row, points), value)
        panels[f"k = {k}"] = lines
    return panels


def _ratios(results: Results, comparisons: Iterable[Comparison]) -> dict[str, Lines]:
    panels: dict[str, dict[str, dict[int, float]]] = {f"k = {k}": {} for k in results.ks}
    for one in comparisons:
        lines = panels[f"k = {one.k}"]
        lines.setdefault(one.pipeline, {})[one.in_flight] = one.ratio.median
        lines.setdefault(BOUND, {})[one.in_flight] = one.bound
    return dict(panels)


def _milliseconds(rows: Iterable[Row | None], value: Value) -> dict[int, float]:
    return {number: 1e3 * seconds for number, seconds in known(rows, value).items()}


def _draw(panels: Mapping[str, Lines], axis: str) -> bytes | None:
    """None if there is nothing to draw."""
    shown = {
        title: {name: points for name, points in lines.items() if points}
        for title, lines in panels.items()
    }
    shown = {title: lines for title, lines in shown.items() if lines}
    if not shown:
        return None
    return charts.lines_by_number(shown, IN_FLIGHT, axis, COLORS, dashed=(BOUND, *BASELINES))
