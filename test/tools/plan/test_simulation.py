"""The simulation serves every request once, and agrees with what is known in closed form."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from sglang_qspec.config import MODES
from sglang_qspec.tools.measure.tables import HostGap, Tables
from sglang_qspec.tools.plan.requests import SimulatedRequest, agreed_tokens
from sglang_qspec.tools.plan.simulation import Group, GroupFigures, quantile, simulate
from sglang_qspec.tools.plan.target import NONE
from sglang_qspec.tools.plan.trace import Arrival, parse
from test.tools.plan.examples import batch, flat

EVERY = (NONE, *MODES)


def run(
    tables: Tables, pipeline: str, slots: int, arrivals: list[Arrival], **more: object
) -> GroupFigures:
    return simulate(Group(pipeline, slots, **more), tables, arrivals)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("pipeline", EVERY)
def test_every_request_finishes_once_with_all_its_tokens(pipeline: str, on_gpu: bool) -> None:
    trace = parse("poisson:5:40", 20, 30)
    arrivals = trace.part(1.0, 40, 3)
    given = {"targets": 2, "outages": ((1.0, 2.0), (4.0, 4.5)), "delay": 0.002}
    found = run(flat(prefill=0.01, on_gpu=on_gpu), pipeline, 4, arrivals, **given)
    assert found.requests == len(found.latencies) == len(found.first_tokens) == 40
    assert found.tokens == sum(arrival.output for arrival in arrivals)
    assert min(found.first_tokens) > 0
    assert found.seconds > arrivals[-1].seconds


def test_without_speculation_the_throughput_is_slots_over_the_time_of_a_pass() -> None:
    # Four answers of one prefill token and 100 passes each, twice.
    found = run(flat(verify=0.04), NONE, 4, batch(8))
    assert found.seconds == pytest.approx(2 * 100 * 0.04)
    assert found.rate == pytest.approx(8 * 101 / (200 * 0.04))
    assert found.batch == 4
    assert found.latencies == pytest.approx([4.0] * 4 + [8.0] * 4)


def test_one_slot_with_random_arrivals_waits_as_a_queue_with_fixed_service() -> None:
    service, load = 0.4, 0.7
    rng = np.random.default_rng(5)
    times = rng.exponential(service / load, 20000).cumsum()
    arrivals = [Arrival(float(each), 1, 3) for each in times]  # a prefill and two passes
    found = run(flat(verify=0.2), NONE, 1, arrivals)
    wait = service * load / (2 * (1 - load))  # Pollaczek-Khinchine, M/D/1
    assert found.latency - service == pytest.approx(wait, rel=0.08)
    assert found.service == pytest.approx(service)


def test_with_perfect_agreement_and_fast_drafts_a_pass_gives_its_width() -> None:
    found = run(flat(1.0, step=1e-5), "ahead", 1, batch(1, 1601))
    assert found.tokens_per_pass == pytest.approx(8, rel=0.04)  # few passes are plain


def test_a_draft_model_that_is_never_right_costs_little() -> None:
    plain = run(flat(0.0), NONE, 4, batch(8, 300))
    for pipeline in ("queue", "ahead", "auto"):
        found = run(flat(0.0), pipeline, 4, batch(8, 300))
        assert found.tokens_per_pass == 1
        assert found.rate > 0.97 * plain.rate


@pytest.mark.parametrize("pipeline", ["queue", "ahead", "auto"])
def test_a_higher_agreement_is_never_slower(pipeline: str) -> None:
    rates = [run(flat(a), pipeline, 4, batch(16, 200)).rate for a in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert all(later > 0.98 * earlier for earlier, later in pairwise(rates))
    assert rates[-1] > 3 * rates[0]


def test_a_slower_link_and_a_dead_sidecar_are_slower() -> None:
    near, far, dead = (
        run(flat(0.9), "ahead", 4, batch(8, 300), delay=delay, outages=outages).rate
        for delay, outages in ((0.0, ()), (0.03, ()), (0.0, ((0.0, 1e6),)))
    )
    assert near > far > dead
    assert dead == pytest.approx(run(flat(0.9), NONE, 4, batch(8, 300)).rate, rel=0.02)


def test_throughput_recovers_after_an_outage() -> None:
    whole = run(flat(0.9), "ahead", 4, batch(40, 300)).seconds
    plain = run(flat(0.9), NONE, 4, batch(40, 300)).seconds
    broken = run(flat(0.9), "ahead", 4, batch(40, 300), outages=((1.0, 3.0),)).seconds
    assert whole + 0.5 < broken < whole + 4.0 < plain


def test_a_slowdown_costs_time_only_while_the_sidecar_drafts() -> None:
    tables = flat(0.9, slowdown=1.5)
    assert run(tables, NONE, 4, batch(8)).rate == run(flat(0.9), NONE, 4, batch(8)).rate
    assert run(tables, "ahead", 4, batch(8)).rate < run(flat(0.9), "ahead", 4, batch(8)).rate


def test_only_a_server_with_speculation_waits_for_the_host_between_passes() -> None:
    tables = msgspec.structs.replace(flat(0.0), gap=[HostGap(1, 0.01), HostGap(64, 0.02)])
    assert run(tables, NONE, 1, batch(1)).seconds == pytest.approx(100 * 0.04)
    assert run(tables, "queue", 1, batch(1)).pass_seconds == pytest.approx(0.05)
    assert run(tables, "ahead", 64, batch(64)).pass_seconds == pytest.approx(0.06)


def test_a_shared_sidecar_drafts_less_for_each_target() -> None:
    rates = []
    for targets in (1, 8):
        tables = flat(0.9, step=0.004)
        found = run(tables, "ahead", 4, batch(8 * targets, 200), targets=targets)
        rates.append(found.rate / targets)
    assert rates[0] > 1.1 * rates[1]


def test_queue_drafts_come_from_the_time_in_the_queue() -> None:
    # A draft step takes longer than a pass, so a draft that starts with its request stays behind.
    waiting = run(flat(0.95, step=0.05), "queue", 2, batch(20, 100))
    alone = run(flat(0.95, step=0.05), "queue", 20, batch(20, 100))
    assert waiting.tokens_per_pass > 2 * alone.tokens_per_pass


@pytest.mark.parametrize("pipeline", EVERY)
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(pipeline: str) -> None:
    tables = flat(["1101", "10", "111110"])
    first, again, other = (
        run(tables, pipeline, 3, batch(9), seed=seed, targets=2) for seed in (1, 1, 2)
    )
    assert first == again
    assert pipeline == NONE or first != other


@pytest.mark.parametrize("pipeline", EVERY)
def test_requests_that_were_served_before_do_not_count(pipeline: str) -> None:
    later = [arrival._replace(seconds=0.3 * n) for n, arrival in enumerate(batch(6, 60))]
    group = Group(pipeline, 2)
    found = simulate(group, flat(0.9), later, before=batch(20, 100))
    alone = simulate(group, flat(0.9), later)
    assert (found.requests, found.tokens) == (alone.requests, alone.tokens)
    assert found.latency == pytest.approx(alone.latency, rel=0.2)
    assert found.seconds == pytest.approx(alone.seconds, rel=0.2)
    assert found.passes == pytest.approx(alone.passes, rel=0.2)


def test_measured_answers_keep_their_runs() -> None:
    agreed = agreed_tokens(["1110"], 10, np.random.default_rng(1))
    assert agreed.tolist() == [True, True, True, False] * 2 + [True, True]
    request = SimulatedRequest(Arrival(0.0, 4, 10), agreed)
    assert [request.next_wrong[place] for place in (0, 3, 4, 8, 10)] == [3, 3, 7, 10, 10]
    request.done = 1
    assert (request.right(1), request.right(5)) == (1, 2)


def test_a_quantile_is_the_smallest_value_that_is_not_exceeded_by_the_share() -> None:
    assert [quantile((1.0, 2.0, 3.0, 4.0), share) for share in (0.0, 0.5, 0.51, 1.0)] == [
        1,
        2,
        3,
        4,
    ]
    assert math.isfinite(quantile((1.0,), 0.99))
