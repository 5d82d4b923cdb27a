"""Ranks agree with the order in which SGLang's own policy sorts its queue."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, SchedulePolicy

from sglang_qspec.engine.scheduler.lifecycle import rank


def queue() -> list[Any]:
    rng = random.Random(5)
    return [
        SimpleNamespace(
            rid=number,
            priority=rng.choice([3, -2, 0]),
            sampling_params=SimpleNamespace(max_new_tokens=rng.choice([5, 50, 500])),
            time_stats=SimpleNamespace(wait_queue_entry_time=float(number)),
        )
        for number in range(30)
    ]


@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("with_priority", [False, True])
@pytest.mark.parametrize("name", ["fcfs", "lof"])
def test_the_order_of_ranks_and_arrival_is_that_of_the_scheduler(
    name: str, with_priority: bool, low_first: bool
) -> None:
    tree_cache = SimpleNamespace(disable=True, supports_fast_match_prefix=lambda: False)
    policy = SchedulePolicy(name, tree_cache, False, with_priority, low_first)
    scheduler = SimpleNamespace(enable_priority_scheduling=with_priority, policy=policy)
    waiting = queue()
    expected = list(waiting)
    # As in `calc_priority`, without its part for the prefix cache.
    if policy.policy is CacheAgnosticPolicy.LOF:
        policy._sort_by_longest_output(expected, with_priority, policy.priority_sign)
    elif with_priority:
        policy._sort_by_priority_and_fcfs(expected, policy.priority_sign)
    waiting.sort(key=lambda req: rank(scheduler, req))
    assert [req.rid for req in waiting] == [req.rid for req in expected]


def test_a_request_without_priority_has_a_rank_that_fits_a_message() -> None:
    scheduler = SimpleNamespace(
        enable_priority_scheduling=True,
        policy=SimpleNamespace(priority_sign=-1, policy=CacheAgnosticPolicy.FCFS),
    )
    params = SimpleNamespace(max_new_tokens=1)
    none = SimpleNamespace(priority=-sys.maxsize - 1, sampling_params=params)
    some = SimpleNamespace(priority=-1000, sampling_params=params)
    assert rank(scheduler, some) < rank(scheduler, none) < (sys.maxsize, 0)
