"""Memory slopes of a soak's server and of its sidecars, on made-up samples."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil

from benchmark.soak.monitor import series
from benchmark.soak.processes import FIGURES, usage
from benchmark.soak.slope import BLOCKS, MIN_PER_BLOCK, slope
from benchmark.soak.summary import server_slopes, sidecar_lives, warm_up


def rows(seconds: int, kill_at: int) -> list[dict[str, Any]]:
    """The scheduler jumps in the first minute, then grows by 36 MiB/h; the front is constant.

    The killed sidecar grows by 72 MiB/h; the next one is constant.
    """
    found = []
    for at in range(seconds):
        first = at < kill_at
        found.append(
            {
                "at": float(at),
                "scheduler_rss_mib": 1000.0 + (500.0 if at > 60 else 0.0) + 0.01 * at,
                "front_rss_mib": 400.0,
                "detokenizer_rss_mib": 300.0,
                "other_rss_mib": 0.0,
                "sidecar_rss_mib": 700.0 + (0.02 * at if first else 0.0),
                "sidecar_pid": 11 if first else 12,
            }
        )
    return found


def test_the_warm_up_is_at_least_a_quarter_or_five_minutes_and_at_most_half() -> None:
    assert warm_up(7200.0) == 1800.0
    assert warm_up(900.0) == 300.0
    assert warm_up(180.0) == 90.0


def test_the_servers_slope_sums_its_processes_after_the_warm_up() -> None:
    slopes = server_slopes(rows(1200, 600), 0.0, 1200.0)
    rss = slopes["rss"]
    assert rss is not None
    assert round(rss.per_hour, 3) == 36.0
    assert slopes["front"] is not None
    assert round(slopes["front"].per_hour, 3) == 0.0
    assert slopes["uss"] is None  # never measured


def test_samples_after_the_load_do_not_count() -> None:
    samples = rows(1200, 600)
    late = [{**row, "at": 1201.0 + row["at"], "front_rss_mib": 0.0} for row in samples]
    assert server_slopes(samples + late, 0.0, 1200.0) == server_slopes(samples, 0.0, 1200.0)
    assert sidecar_lives(samples + late, 1200.0) == sidecar_lives(samples, 1200.0)


def test_each_long_lived_sidecar_has_its_own_slope_longest_life_first() -> None:
    lives = sidecar_lives(rows(1200, 700), 1200.0)
    assert [life["minutes"] for life in lives] == [11.7, 8.3]
    assert [life["mib_per_h"]["per_hour"] for life in lives] == [72.0, 0.0]
    assert [life["minutes"] for life in sidecar_lives(rows(1200, 1170), 1200.0)] == [19.5]
    assert sidecar_lives([], 10.0) == []


def test_a_series_leaves_out_samples_that_lack_a_column() -> None:
    samples = [
        {"at": 0.0, "a": 1.0, "b": 2.0},
        {"at": 1.0, "a": 5.0},
        {"at": 2.0, "a": 3.0, "b": 4},
    ]
    assert series(samples, ("a", "b")) == [(0.0, 3.0), (2.0, 7.0)]
    assert series(samples, ("a",), since=1.0) == [(1.0, 5.0), (2.0, 3.0)]


def noisy(per_hour: float, seed: int) -> list[tuple[float, float]]:
    """One sample per second around 500, with correlated noise as in memory figures."""
    rng = random.Random(seed)
    away, found = 0.0, []
    for second in range(3600):
        away = 0.9 * away + rng.gauss(0.0, 1.0)
        found.append((float(second), 500.0 + per_hour * second / 3600 + away))
    return found


def test_a_straight_line_has_its_slope_and_an_interval_of_width_0() -> None:
    samples = [(float(second), 100.0 + 0.01 * second) for second in range(600)]
    random.Random(1).shuffle(samples)
    found = slope(samples)
    assert found is not None
    assert math.isclose(found.per_hour, 36.0)
    assert math.isclose(found.low, 36.0)
    assert math.isclose(found.high, 36.0)


def test_the_interval_contains_the_true_slope_in_about_19_of_20_cases() -> None:
    """With correlated noise, an interval from single samples would be too narrow."""
    hits = 0
    for seed in range(200):
        found = slope(noisy(3.0, seed))
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    assert 180 <= hits <= 199


def test_too_few_samples_have_no_slope() -> None:
    enough = [(float(second), 1.0) for second in range(BLOCKS * MIN_PER_BLOCK)]
    assert slope(enough) is not None
    assert slope(enough[:-1]) is None
    assert slope([]) is None
    assert slope([(1.0, 2.0)] * 100) is None


def test_a_gap_that_empties_a_block_gives_no_slope() -> None:
    """A suspended machine leaves a gap, and the other samples would get wrong weights."""
    samples = [(float(second), 1.0) for second in range(600) if not 200 < second < 320]
    assert slope(samples) is None


def test_memory_and_files_are_summed_by_role() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = [psutil.Process(), *[psutil.Process(child.pid)] * 2]
        server: Any = SimpleNamespace(processes=processes)
        found = usage(server, with_uss=True)
        assert child.stdin is not None
        child.stdin.close()
    roles = {"front", "other"}
    assert found.keys() == {f"{role}_{name}" for role in roles for name in FIGURES}
    assert found["front_rss_mib"] > found["front_uss_mib"] > 1
    assert found["other_files"] >= 2 * 3
    assert "front_uss_mib" not in usage(SimpleNamespace(processes=processes[:1]))  # type: ignore[arg-type]
