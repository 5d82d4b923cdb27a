"""Draws the memory, files and requests of the server and the sidecar during the soak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmark.harness import charts
from benchmark.harness.charts import Panels
from benchmark.harness.report import Figure
from benchmark.soak.monitor import Row, series
from benchmark.soak.processes import SERVER_ROLES, SIDECAR

POINTS = 400
"""Maximum number of points of a line."""
PANELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "server memory, MiB resident": {
        "all processes": tuple(f"{role}_rss_mib" for role in SERVER_ROLES),
        **{role: (f"{role}_rss_mib",) for role in ("scheduler", "front", "detokenizer")},
    },
    "sidecar memory, MiB": {"resident": (f"{SIDECAR}_rss_mib",), "own": (f"{SIDECAR}_uss_mib",)},
    "open files": {
        role: (f"{role}_files",) for role in ("front", "scheduler", "detokenizer", SIDECAR)
    },
    "requests": {
        "sent": ("in_flight",),
        "live": ("live_requests",),
        "drafted for": ("requests_in_flight",),
    },
    "tokens": {"in tries": ("trie_tokens",), "in the sidecar's KV": ("sidecar_kv_tokens",)},
    "sidecar": {"prompts": ("sidecar_texts",), "KV rows": ("sidecar_kv_rows",)},
}
"""Panels by title; a panel has lines by name, and a line is the sum of columns of the journal."""


def figure(rows: list[Row], kills: Sequence[float]) -> Figure | None:
    """The chart; None without samples. A vertical line marks each of `kills`, in seconds."""
    found = {
        title: {name: line for name, columns in named.items() if (line := _line(rows, columns))}
        for title, named in PANELS.items()
    }
    panels: Panels = {title: named for title, named in found.items() if named}
    if not panels:
        return None
    marks = [at / 60 for at in kills]
    axis = "minutes; red: the sidecar was killed"
    svg = charts.lines(panels, axis, marks=marks, stacked=True)
    return Figure("memory", "Memory, files and requests", "", svg)


def _line(rows: list[Row], columns: tuple[str, ...]) -> dict[float, float]:
    """The sum of the columns at each sample, by minutes since the start."""
    points = series(rows, columns)
    step = 1 + len(points) // POINTS
    return {at / 60: value for at, value in points[::step]}
