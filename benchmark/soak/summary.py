"""Computes the figures of a soak: slopes of memory, and the lives of the sidecars."""

from __future__ import annotations

from typing import Any

from benchmark.soak.monitor import Row, series
from benchmark.soak.processes import SERVER_ROLES, SIDECAR
from benchmark.soak.slope import Slope, slope

WARM_UP_S = 300.0
LEAST_LIFE_S = 60.0
LEAST_LIFE_SHARE = 0.1
"""Minimum life of a sidecar, as a share of the soak; a shorter life is too short for a slope."""


def warm_up(seconds: float) -> float:
    """Seconds that a slope leaves out, while caches and the allocator fill up.

    They are a quarter of `seconds`, but at least WARM_UP_S, and at most half of `seconds`.
    """
    return max(seconds / 4, min(WARM_UP_S, seconds / 2))


def server_slopes(rows: list[Row], began: float, ended: float) -> dict[str, Slope | None]:
    """MiB per hour of all processes but the sidecar, from `began` to `ended` without the warm-up.

    `rss` and `uss` are sums over all roles; the other keys are the resident memory of one role.
    """
    within = [row for row in rows if row["at"] <= ended]
    since = began + warm_up(ended - began)
    columns = {
        "rss": tuple(f"{role}_rss_mib" for role in SERVER_ROLES),
        "uss": tuple(f"{role}_uss_mib" for role in SERVER_ROLES),
        **{role: (f"{role}_rss_mib",) for role in SERVER_ROLES},
    }
    return {name: slope(series(within, found, since)) for name, found in columns.items()}


def sidecar_lives(rows: list[Row], ended: float) -> list[dict[str, Any]]:
    """Every long life of a sidecar, the longest first.

    Each has its time, and the slope of its resident memory without the warm-up.
    """
    within = [row for row in rows if row["at"] <= ended]
    pids = dict.fromkeys(row["sidecar_pid"] for row in within if "sidecar_pid" in row)
    least = (
        max(LEAST_LIFE_S, LEAST_LIFE_SHARE * (within[-1]["at"] - within[0]["at"])) if pids else 0
    )
    lives = []
    for pid in pids:
        samples = series(within, (f"{SIDECAR}_rss_mib",), pid=pid)
        begin, end = samples[0][0], samples[-1][0]
        if end - begin < least:
            continue
        since = begin + warm_up(end - begin)
        found = slope(series(within, (f"{SIDECAR}_rss_mib",), since, pid))
        lives.append(
            {
                "from_s": round(begin),
                "minutes": round((end - begin) / 60, 1),
                "rss_mib": round(samples[-1][1], 1),
                "mib_per_h": None if found is None else found.record(),
            }
        )
    return sorted(lives, key=lambda life: -life["minutes"])
