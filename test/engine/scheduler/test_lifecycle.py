"""Requests that join the queue: their ranks, and fields that cannot be read."""

import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, SchedulePolicy

from sglang_qspec.engine import speculation
from sglang_qspec.engine.scheduler import lifecycle
from sglang_qspec.engine.scheduler.lifecycle import rank
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.policy.precedence import LONGEST
from test.engine.speculating import connect, counting, poll, tree_of


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


def joining(rid: str, **changes: Any) -> Any:
    """SGLang's request with its fields."""
    fields: dict[str, Any] = {
        "custom_params": None,
        "max_new_tokens": 20,
        "stop_token_ids": {2},
        "ignore_eos": False,
        "top_k": 1,
        "sampling_seed": None,
    }
    params = SimpleNamespace(**{name: changes.pop(name, fields[name]) for name in fields})
    req = {
        "to_finish": None,
        "customized_info": None,
        "custom_logit_processor": None,
        "multimodal_inputs": None,
        "input_embeds": None,
        "origin_input_ids_unpadded": [5, 6, 7],
        "output_ids": [],
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
        "priority": 0,
    }
    return SimpleNamespace(rid=rid, sampling_params=params, **(req | changes))


@pytest.mark.parametrize(
    "fault",
    [
        *({"custom_params": value} for value in ("x", 5)),
        {"custom_params": [1]},
        {"custom_params": {5: 1, "qspec_enabled": []}},
        *({"max_new_tokens": value} for value in (None, "x", 8.0)),
        *({"stop_token_ids": value} for value in (5, [2, "x"])),
        *({"priority": value} for value in ("x", None)),
        {"origin_input_ids_unpadded": None},
    ],
    ids=str,
)
def test_a_fault_of_one_request_costs_at_most_its_drafts(fault: dict[str, Any]) -> None:
    active = connect(FakeSidecarLink(counting))
    speculation.activate(active)
    policy = SimpleNamespace(priority_sign=1, policy=CacheAgnosticPolicy.LOF)
    scheduler = SimpleNamespace(enable_priority_scheduling=True, policy=policy)
    for req in (joining("bad", **fault), joining("good")):
        scheduler.waiting_queue = [req]
        lifecycle.enqueued(None, scheduler, req)
    assert not speculation.failed()
    assert active.live("good") is not None
    poll(active)
    assert tree_of(active, "good", [8], 4).token_ids == (8, 9, 10, 11)
    active.check_integrity()


def test_a_chat_that_gets_no_drafts_shortens_the_passes_over_lines_too() -> None:
    active = connect(FakeSidecarLink(counting))
    speculation.activate(active)
    policy = SimpleNamespace(priority_sign=-1, policy=CacheAgnosticPolicy.FCFS)
    scheduler = SimpleNamespace(enable_priority_scheduling=True, policy=policy)
    line, chat = joining("line", priority=-1000), joining("chat", multimodal_inputs=object())
    scheduler.waiting_queue = [line]
    lifecycle.enqueued(None, scheduler, line)
    assert active.longest_pass(["line"]) == math.inf
    scheduler.waiting_queue = [chat]
    lifecycle.enqueued(None, scheduler, chat, is_retracted=True)
    assert active.longest_pass(["line"]) == math.inf
    lifecycle.enqueued(None, scheduler, chat)
    assert active.live("chat") is None
    assert active.longest_pass(["line"]) == LONGEST
