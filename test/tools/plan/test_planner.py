"""The planner divides GPUs, and chooses the plan that is obviously right."""

from __future__ import annotations

import math

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.limits import chunk_bytes, commits_bytes, drafted_bytes, lines_of
from sglang_qspec.tools.plan.planner import Plan, Planner, Slo, best
from sglang_qspec.tools.plan.target import NONE
from sglang_qspec.tools.plan.trace import parse
from test.tools.plan.examples import flat


def planner(tables: Tables, trace: str = "batch:400", output: int = 60) -> Planner:
    return Planner(tables, parse(trace, 10, output))


def chosen(tables: Tables, gpus: int) -> tuple[Plan, Plan]:
    """The best plan with drafts, and the best without."""
    found = planner(tables)
    return (
        best(found.plans(gpus, ["ahead"], [4]), None),
        best(found.plans(gpus, [NONE], [4]), None),
    )


@pytest.mark.parametrize(
    ("gpus", "fan_in", "size", "expected"),
    [
        (12, 1, (1, 1), (6, 6, 12)),
        (12, 4, (1, 1), (9, 3, 12)),  # three targets for each sidecar
        (11, 4, (1, 1), (8, 2, 10)),  # one GPU is left
        (16, 1, (4, 1), (3, 3, 15)),
        (16, 2, (4, 1), (3, 2, 14)),
    ],
)
def test_gpus_are_divided_between_targets_and_sidecars(
    gpus: int, fan_in: int, size: tuple[int, int], expected: tuple[int, int, int]
) -> None:
    plan = planner(flat(gpus=size), "batch:20", 10).plan(gpus, "ahead", 4, fan_in)
    assert (plan.targets, plan.sidecars, plan.gpus) == expected
    assert plan.group.targets == math.ceil(plan.targets / plan.sidecars)


def test_one_sidecar_for_all_targets_of_a_node_is_tried_however_busy_it_is() -> None:
    plans = planner(flat(0.9, step=0.01, on_gpu=True)).plans(8, ["ahead"], [4])
    assert [plan.group.targets for plan in plans] == [1, 2, 3, 7]
    assert plans[1].figures.sidecar_busy > 0.9
    late = planner(flat(0.9, step=0.02)).plans(8, ["ahead"], [4])
    assert [plan.group.targets for plan in late] == [1, 2]
    assert [plan.group.targets for plan in planner(flat()).plans(2, ["ahead"], [4])] == [1]


def test_too_few_gpus_are_an_error_that_names_the_least() -> None:
    found = planner(flat(gpus=(4, 1)))
    with pytest.raises(ConfigError, match="--gpus is 4, but must be at least 5 for ahead"):
        found.plan(4, "ahead", 4)
    assert not found.plans(4, ["ahead"], [4])
    assert found.plan(4, NONE, 4).targets == 1


def test_a_good_draft_model_is_worth_gpus_and_a_bad_one_is_not() -> None:
    drafted, plain = chosen(flat(0.95), 8)
    assert drafted.rate > 2 * plain.rate
    assert drafted.cost(2.0) < plain.cost(2.0)
    drafted, plain = chosen(flat(0.05), 8)
    assert drafted.rate < plain.rate


def test_a_fast_draft_model_serves_many_targets_and_a_slow_one_few() -> None:
    fast, _ = chosen(flat(0.9, step=0.0002), 18)
    slow, _ = chosen(flat(0.9, step=0.02), 18)
    assert fast.group.targets > slow.group.targets


def test_the_price_follows_from_gpus_and_throughput() -> None:
    plan = planner(flat()).plan(8, NONE, 4)
    assert plan.rate == pytest.approx(8 * plan.figures.rate)
    assert plan.cost(3.6) == pytest.approx(8 * 3.6 / 3600 * 1e6 / plan.rate)


def test_a_part_of_a_batch_stands_for_the_whole_batch() -> None:
    part = planner(flat(), "batch:100000").plan(8, NONE, 4)
    assert part.figures.requests < 1000
    longest = 100000 / 8 / 4 * 60 * 0.04  # requests of a slot, one after another
    assert part.latency("p99") == pytest.approx(longest, rel=0.1)


def test_a_batch_that_is_smaller_than_the_plan_has_only_its_own_tokens() -> None:
    one, few = (planner(flat(), f"batch:{count}").plan(64, NONE, 4) for count in (1, 80))
    assert one.rate == pytest.approx(one.figures.rate)
    # Two requests on the fullest of 64 targets, at once.
    assert few.figures.requests == 2
    assert few.rate == pytest.approx(80 / 2 * few.figures.rate)
    (router,) = lines_of(one, parse("batch:1", 10, 60), 10.0)
    assert router.startswith("Router: 0 requests/s and 25 streamed chunks/s")


def test_the_end_of_a_simulated_batch_does_not_lower_the_rate_of_a_long_one() -> None:
    # A pass takes 0.04 s, and nothing else takes time.
    long = planner(flat(), "batch:1000000").plan(8, NONE, 64)
    assert long.rate == pytest.approx(8 * 64 / 0.04, rel=0.02)
    assert long.figures.rate < 0.9 * long.rate / 8
    assert planner(flat(), "poisson:1:9").plan(8, NONE, 64).load == pytest.approx(
        60 / long.rate, rel=0.02
    )


@pytest.mark.parametrize("trace", ["batch:100000", "poisson:2:100000"])
def test_a_short_outage_hardly_changes_the_rate_of_a_long_trace(trace: str) -> None:
    def plan(outages: tuple[tuple[float, float], ...]) -> Plan:
        return Planner(flat(0.9), parse(trace, 10, 60), outages=outages).plan(2, "ahead", 4)

    whole, broken = plan(()), plan(((0.0, 10.0),))
    assert broken.latency("mean") > whole.latency("mean")
    assert broken.rate == pytest.approx(whole.rate, rel=0.01)
    assert broken.load == pytest.approx(whole.load)


def test_what_exceeds_the_capacity_is_overloaded() -> None:
    # A target with four slots gives 4 / 0.04 s = 100 tokens/s, which are 1.67 requests/s.
    over, under = (planner(flat(), f"poisson:{rate}:1000").plan(1, NONE, 4) for rate in (2.0, 1.0))
    assert over.load == pytest.approx(1.2, rel=0.1)
    assert (over.is_overloaded, under.is_overloaded) == (True, False)
    assert math.isinf(over.latency("mean"))
    assert not over.meets(None)
    assert under.rate == pytest.approx(60)


def test_an_slo_excludes_plans_and_the_closest_one_stands_in() -> None:
    found = planner(flat(), "poisson:1.2:1000")
    plans = [found.plan(1, NONE, slots) for slots in (1, 2, 32)]
    assert best(plans, Slo("p95", 10.0)).group.slots == 32
    assert best(plans, Slo("mean", 1e-6)).group.slots == 32


def test_the_fewest_gpus_keep_the_slo() -> None:
    found = planner(flat(), "poisson:10:1000")
    slo = Slo("mean", 4.0)
    least = found.fewest(found.plan(40, NONE, 4), slo)
    assert least.meets(slo)
    assert 6 <= least.gpus < 12  # 10 requests/s need 6 targets at least
    assert not found.plan(6, NONE, 4).meets(slo)


def test_limits_follow_from_the_messages() -> None:
    assert commits_bytes(8, 3) - commits_bytes(8, 2) == 8 * 5
    assert 100 < drafted_bytes() < 300
    assert 200 < chunk_bytes() < 500
    trace = parse("batch:100", 10, 60)
    sidecar, link, router = lines_of(Planner(flat(), trace).plan(4, "ahead", 4), trace, 10.0)
    assert sidecar.startswith("Sidecar: it drafts")
    assert "10 Gbit/s hold" in link
    assert "requests/s" in router
    assert "for the report of a pass" in link
    assert len(lines_of(Planner(flat(), trace).plan(4, NONE, 4), trace, 10.0)) == 1
    _, link, _ = lines_of(Planner(flat(), trace).plan(4, "queue", 4), trace, 10.0)
    assert "report" not in link
