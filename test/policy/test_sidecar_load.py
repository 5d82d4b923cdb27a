"""The weights of sidecars follow their load in coarse steps."""

from __future__ import annotations

import pytest

from sglang_qspec.messages import Heartbeat
from sglang_qspec.policy.sidecar_load import (
    FULL,
    LEAST,
    MEMORY,
    Level,
    SidecarLoad,
    joint_step_times,
    weights_of,
)


def load(requests: int = 0, seconds: float | None = 0.01) -> SidecarLoad:
    found = SidecarLoad()
    times = [] if seconds is None else [(1.0, seconds), (8.0, 3 * seconds)]
    found.observe(Heartbeat(requests, 0, 0, 0, step_times=times))
    return found


def weights(**loads: SidecarLoad) -> dict[str, float]:
    return weights_of(loads)


def test_equal_sidecars_have_equal_weights() -> None:
    assert weights(a=load(), b=load()) == {"a": 1.0, "b": 1.0}
    assert weights(a=load(50), b=load(50)) == {"a": 1.0, "b": 1.0}
    assert weights_of({}) == {}


def test_a_sidecar_that_is_slower_or_has_more_to_do_has_a_lower_weight() -> None:
    assert weights(a=load(), b=load(seconds=0.02)) == {"a": 1.0, "b": 0.5}
    assert weights(a=load(), b=load(3 * FULL)) == {"a": 1.0, "b": 0.25}
    assert weights(a=load(), b=load(FULL, 0.02)) == {"a": 1.0, "b": 0.25}


def test_no_weight_is_too_low_for_any_request() -> None:
    assert weights(a=load(), b=load(10**6, 10.0)) == {"a": 1.0, "b": LEAST}


def test_a_sidecar_of_unknown_speed_counts_as_the_fastest() -> None:
    assert weights(slow=load(seconds=0.08), fast=load(), new=SidecarLoad()) == {
        "slow": 0.5,
        "fast": 1.0,
        "new": 1.0,
    }
    assert weights(a=load(seconds=None), b=SidecarLoad()) == {"a": 1.0, "b": 1.0}


def test_a_sidecar_loses_only_a_factor_to_another_that_says_that_it_is_faster() -> None:
    liars = {"fast": load(seconds=1e-300), "faster": load(seconds=5e-324)}
    assert weights(**liars, honest=load())["honest"] == 0.5


def test_a_sidecar_waits_at_least_for_the_requests_of_this_server() -> None:
    liar = SidecarLoad()
    liar.observe(Heartbeat(0, 0, 0, 0), 3 * FULL)
    assert weights(honest=load(3 * FULL, None), liar=liar) == {"honest": 1.0, "liar": 1.0}


def test_a_sidecar_without_use_has_the_least_weight_until_it_is_of_use() -> None:
    useful, useless = load(), load(seconds=1e-300)
    for accepted, expected in ((0, LEAST), (3, 1.0)):
        for _ in range(2 * MEMORY):
            useful.count(3, 4)
            useless.count(accepted, 4)
        for each in (useful, useless):
            each.observe(None)
        assert weights(useful=useful, useless=useless)["useless"] == expected
    assert weights(useful=useful, new=SidecarLoad()) == {"useful": 1.0, "new": 1.0}


def test_a_small_change_changes_no_weight() -> None:
    busy = load(FULL)
    for requests in (FULL + 6, FULL - 6, FULL + 6):
        busy.observe(Heartbeat(requests, 0, 0, 0, step_times=[(1.0, 0.01)]))
        assert weights(a=load(), b=busy)["b"] == 0.5


@pytest.mark.parametrize("seconds", [0.009, 0.0115, 0.0163])
def test_a_level_does_not_flap_at_its_bound(seconds: float) -> None:
    level = Level()
    level.follow(seconds)
    first = level.value
    for factor in (0.85, 1.17, 0.85, 1.17):
        level.follow(seconds * factor)
        assert level.value == first


def test_a_level_follows_a_large_change() -> None:
    level = Level()
    level.follow(1.0)
    level.follow(4.0)
    assert level.value == 2
    level.follow(1.1)
    assert level.value == 0


def test_one_sidecar_keeps_its_step_times() -> None:
    assert joint_step_times([]) == joint_step_times([[]]) == []
    assert joint_step_times([[(1.0, 0.01)], []]) == [(1.0, 0.01)]


def test_several_sidecars_take_as_long_as_the_slowest_with_its_share() -> None:
    fast, slow = [(1.0, 0.01), (4.0, 0.02)], [(1.0, 0.02), (3.0, 0.06)]
    assert joint_step_times([fast, slow]) == [
        (2.0, 0.02),
        (6.0, 0.06),
        (8.0, pytest.approx(0.08)),
    ]
