"""The disturbances of a sidecar during a soak, and the check for leaks after it."""

import itertools

from benchmark.soak.disturbance import LONG_LIFE, SETTINGS, strokes
from benchmark.soak.leaks import FILES_SLACK, grown

HOUR_S = 3600.0


def lives(seed: int, seconds: float) -> list[float]:
    """Planned seconds from each kill to the next one."""
    found, life = [], 0.0
    for stroke in itertools.islice(strokes(seed, seconds), 2000):
        life += stroke.gap_s + stroke.stopped_s
        if stroke.killed:
            found.append(life)
            life = 0.0
    return found


def test_some_sidecars_live_long_enough_to_measure_memory_and_some_do_not() -> None:
    found = lives(1, 2 * HOUR_S)
    long = [life for life in found if life >= LONG_LIFE[0] * 2 * HOUR_S]
    short = [life for life in found if life < 60.0]
    assert len(long) > 5
    assert len(short) > 5
    assert max(found) < (LONG_LIFE[1] + 0.05) * 2 * HOUR_S
    assert long[0] == found[0]


def test_sidecars_are_stopped_between_kills_and_some_are_killed_while_stopped() -> None:
    planned = list(itertools.islice(strokes(1, HOUR_S), 2000))
    assert planned == list(itertools.islice(strokes(1, HOUR_S), 2000))
    assert planned != list(itertools.islice(strokes(2, HOUR_S), 2000))
    assert sum(not stroke.killed for stroke in planned) > 500
    assert {bool(stroke.stopped_s) for stroke in planned if stroke.killed} == {True, False}
    assert all(stroke.stopped_s > 0 for stroke in planned if not stroke.killed)


def test_every_changed_setting_is_restored() -> None:
    assert all((back is not None) == allowed for _, _, back, allowed in SETTINGS)
    by_name: dict[str, set[int]] = {}
    for name, _, back, _ in SETTINGS:
        if back is not None:
            by_name.setdefault(name, set()).add(back)
    assert all(len(values) == 1 for values in by_name.values())


def test_open_files_count_as_a_leak_above_a_slack() -> None:
    before = {"front_files": 30, "scheduler_files": 50}
    assert grown(before, {"front_files": 30 + FILES_SLACK, "scheduler_files": 10}) == {}
    after = {"front_files": 31 + FILES_SLACK, "scheduler_files": 50}
    assert grown(before, after) == {"front_files": FILES_SLACK + 1}
