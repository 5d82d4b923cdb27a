"""What the server and the sidecar held over the soak, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark.soak.monitor import Row, series
from benchmark.soak.processes import SERVER_ROLES, SIDECAR

INCHES = (9.0, 11.0)
DOTS_PER_INCH = 120
PANELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "server memory, MiB resident": {
        "all processes": tuple(f"{role}_rss_mib" for role in SERVER_ROLES),
        "scheduler": ("scheduler_rss_mib",),
        "front": ("front_rss_mib",),
        "detokenizer": ("detokenizer_rss_mib",),
    },
    "sidecar memory, MiB": {
        "resident": (f"{SIDECAR}_rss_mib",),
        "its own": (f"{SIDECAR}_uss_mib",),
    },
    "open files": {
        role: (f"{role}_files",) for role in ("front", "scheduler", "detokenizer", SIDECAR)
    },
    "requests": {
        "sent": ("in_flight",),
        "live": ("live_requests",),
        "drafted for": ("requests_in_flight",),
    },
    "tokens": {"in tries": ("trie_tokens",), "in the sidecar's KV": ("sidecar_kv_tokens",)},
    "sidecar": {"prompts": ("sidecar_texts",), "KV rows": ("sidecar_rows",)},
}
"""What is drawn: titles, and in each the names of lines with the columns that are added up."""


def draw(rows: list[Row], kills: Sequence[float], warm_up: float, path: Path) -> None:
    """Write the chart; `kills` and the end of the warm-up are seconds, and are marked."""
    from matplotlib.figure import Figure

    panels = {
        title: found
        for title, lines in PANELS.items()
        if (found := {name: points for name, c in lines.items() if (points := series(rows, c))})
    }
    if not panels:
        return
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    several = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(several, panels.items(), strict=True):
        for name, points in lines.items():
            minutes = [at / 60 for at, _ in points]
            axes.plot(minutes, [value for _, value in points], linewidth=0.9, label=name)
        for number, at in enumerate(kills):
            label = "sidecar killed" if number == 0 else None
            axes.axvline(at / 60, color="#dc2626", linewidth=0.8, alpha=0.7, label=label)
        axes.axvline(warm_up / 60, color="#64748b", linestyle="--", linewidth=0.8)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0")
        axes.legend(frameon=False, fontsize=7, ncols=5, loc="lower right")
    several[-1].set_xlabel("minutes; dashed: end of the warm-up")
    figure.savefig(path)
