"""The planner agrees with an estimate that was made apart from it, of an 8B target on H100s.

The estimate was made by hand before any GPU ran QSPEC. It is of decode passes, for requests with
about 1000 tokens. docs/plan.md has its figures beside those of the planner.
"""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from sglang_qspec.policy.pipelines import estimates
from sglang_qspec.tools.measure.tables import HostGap, Prefill, Tables, Verify
from sglang_qspec.tools.plan.cards import TODAY, WIDTHS, Terms, computed
from sglang_qspec.tools.plan.planner import Planner
from sglang_qspec.tools.plan.simulation import Group, simulate
from sglang_qspec.tools.plan.target import NONE
from sglang_qspec.tools.plan.trace import Arrival, parse

PLAIN = {1: 164, 8: 1247, 32: 4243, 64: 7077, 128: 10625}
"""Estimated tokens per second of one GPU without speculation, by requests in flight."""
FIXED = Terms(host_gap=((1, 0.5e-3),), step_launch=0.4e-3, cascade=TODAY.cascade)
"""The terms after the improvements that the estimate proposes."""
PAIRS = {
    (TODAY, 0.6): (1.23, 1.18, 1.12, 1.06, 0.88),
    (TODAY, 0.7): (1.45, 1.40, 1.30, 1.21, 0.95),
    (TODAY, 0.8): (1.80, 1.72, 1.57, 1.42, 1.05),
    (FIXED, 0.7): (1.79, 1.71, 1.60, 1.53, 1.24),
}
"""Estimated throughput of a target with a sidecar, over that of one plain GPU."""
SLOTS = 64
"""Rows of a draft step in the estimate. The planner's sidecars have more, which only matters at 128
requests."""
CELLS = [
    (terms, alpha, requests, estimated)
    for (terms, alpha), row in PAIRS.items()
    for requests, estimated in zip(PLAIN, row, strict=True)
]
WITHIN, SIMULATED_WITHIN = 0.07, 0.16
"""Relative tolerances of times and formulas, and of the simulation, in which steps are whole."""
MEASURED = {
    1: (6.35, 8.6, 9.2, 10.7, 10.6),
    8: (6.57, 9.2, 9.6, 11.3, 11.5),
    32: (7.07, 10.0, 10.7, 13.4, 15.3),
    64: (7.62, 10.5, 12.0, 16.0, 21.4),
}
"""Milliseconds of passes on one H100 by requests: plain ones of stock SGLang, and those of QSPEC
of each of WIDTHS, host work included (docs/results.md)."""


def pair(alpha: float, terms: Terms = TODAY, context: int = 1024) -> Tables:
    """Computed tables in which prefills take no time."""
    tables = computed("H100:8B:0.6B", alpha, context, terms)
    return msgspec.structs.replace(tables, prefill=Prefill(0.0, 0.0))


def ratio(tables: Tables, requests: int) -> float:
    """Simulated output tokens per second of a target with a sidecar, over those of a plain one."""
    arrivals = [Arrival(0.0, 16, 128)] * max(16, 2 * requests)
    rates = (
        simulate(Group(pipeline, requests, delay=1e-4), tables, arrivals).steady_rate
        for pipeline in ("ahead", NONE)
    )
    return next(rates) / next(rates)


@pytest.mark.parametrize("requests", PLAIN)
def test_a_plain_pass_takes_the_estimated_time(requests: int) -> None:
    assert requests / pair(0.7).passes(requests, 1) == pytest.approx(PLAIN[requests], rel=WITHIN)


@pytest.mark.parametrize(("terms", "alpha", "requests", "estimated"), CELLS)
def test_the_formulas_give_the_estimate(
    terms: Terms, alpha: float, requests: int, estimated: float
) -> None:
    tables = pair(alpha, terms)

    def verify(b: int, width: int) -> float:
        return tables.passes(b, width) + tables.gap_seconds(b)

    def draft(k: int, b: int) -> float:
        steps = -(-b // SLOTS)
        return k * steps * tables.step_seconds(min(b, SLOTS))

    rates = [
        estimates(alpha, w - 1, requests, verify, partial(draft, w - 1))["ahead"].rate
        for w in (2, 3, 4, 6, 8)
    ]
    plain = requests / tables.passes(requests, 1)
    assert max(rates) / plain == pytest.approx(estimated, rel=WITHIN)


@pytest.mark.parametrize(("terms", "alpha", "requests", "estimated"), CELLS)
def test_a_simulated_pair_is_near_the_estimate_and_below_two_plain_servers(
    terms: Terms, alpha: float, requests: int, estimated: float
) -> None:
    found = ratio(pair(alpha, terms), requests)
    assert found == pytest.approx(estimated, rel=SIMULATED_WITHIN)
    assert found < 2


@pytest.mark.parametrize(("terms", "pays"), [(TODAY, False), (FIXED, True)])
def test_one_sidecar_for_seven_targets_pays_with_the_terms_that_are_proposed(
    terms: Terms, pays: bool
) -> None:
    planner = Planner(computed("H100:8B:0.6B", 0.7, 640, terms), parse("batch:9999", 256, 128))
    one_for_seven, plain = planner.plan(8, "auto", 8, 7), planner.plan(8, NONE, 8)
    assert (one_for_seven.targets, one_for_seven.sidecars) == (7, 1)
    assert (one_for_seven.rate > plain.rate) == pays


@pytest.mark.parametrize("requests", MEASURED)
def test_the_passes_measured_on_an_h100_leave_less(requests: int) -> None:
    tables = pair(0.7, context=200)  # the texts of the measurement
    waits = {b: with_gap - plain for b, (plain, with_gap, *_) in MEASURED.items()}
    measured = msgspec.structs.replace(
        tables,
        gap=[HostGap(b, wait / 1e3) for b, wait in waits.items()],
        verify=[
            Verify(b, width, (ms - waits[b]) / 1e3)
            for b, (_, *row) in MEASURED.items()
            for width, ms in zip(WIDTHS, row, strict=True)
        ],
    )
    assert 0.7 < ratio(measured, requests) < 0.9 * ratio(tables, requests)
