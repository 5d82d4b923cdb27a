"""Tokens and seconds of each pipeline, compared with simulations and at limits."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from sglang_qspec.errors import TheoryError
from sglang_qspec.policy.acceptance import expected_tokens
from sglang_qspec.policy.pipelines import Estimate, estimates
from test.tools.theory import simulation

V, D = 0.040, 0.014
ALPHAS = (0.0, 0.5, 0.9, 0.97, 1.0)


def verify(b: int, width: int) -> float:
    """Seconds of a pass, constant up to eight rows."""
    return V + 0.0005 * max(0, b * width - 8)


def draft(b: int) -> float:
    return D * (0.8 + 0.2 * b)


def rates(*given: Any) -> dict[str, float]:
    return {name: estimate.rate for name, estimate in estimates(*given).items()}


def flat(
    alpha: float = 0.97, k: int = 4, b: int = 8, v: float = V, d: float = D, **more: float
) -> dict[str, Estimate]:
    """Estimates with V and D constant over the number of requests."""
    return estimates(alpha, k, b, lambda *_: v, lambda _: d, again=more.get("again", 0.5))


def test_sequential_matches_a_simulation_of_drafting_and_verifying_in_turn() -> None:
    tokens, seconds = simulation.in_turn(0.9, 4, V, D, 20_000)
    sequential = flat(0.9)["sequential"]
    assert sequential.tokens == pytest.approx(tokens, rel=0.02)
    assert sequential.seconds == pytest.approx(seconds)
    assert sequential.rate == pytest.approx(8 * tokens / seconds, rel=0.02)


@pytest.mark.parametrize("d", [0.004, 0.030, 0.040, 0.090])
def test_a_round_of_halves_matches_a_simulation_of_two_alternating_workers(
    d: float,
) -> None:
    assert flat(d=d)["halves"].seconds == pytest.approx(
        simulation.alternating(V, d, 1000), rel=0.005
    )


def test_halves_of_an_odd_number_overlap_the_larger_with_the_smaller() -> None:
    halves = estimates(0.9, 4, 5, lambda b, _: float(b), lambda b: 2.5 * b)["halves"]
    assert halves.seconds == max(3, 2.5 * 2) + max(2, 2.5 * 3)


def test_one_request_is_not_halved() -> None:
    found = flat(b=1)
    assert found["halves"] == found["sequential"]


@pytest.mark.parametrize(
    ("alpha", "k", "b", "step", "tolerance"),
    [
        (0.97, 4, 1, 0.0020, 0.02),
        (0.97, 4, 8, 0.0020, 0.02),
        (0.97, 4, 8, 0.0035, 0.02),
        (0.90, 4, 1, 0.0033, 0.02),
        (1.00, 4, 8, 0.0123, 0.02),
        (0.60, 4, 8, 0.0020, 0.03),
        (0.97, 15, 8, 0.0033, 0.03),
        (0.97, 4, 8, 0.0500, 0.02),
        # A draft step is running when these texts diverge; the formula neglects that.
        (0.90, 4, 8, 0.0090, 0.06),
        (0.80, 4, 4, 0.0127, 0.09),
    ],
)
def test_ahead_matches_the_simulation_with_the_best_wait(
    alpha: float, k: int, b: int, step: float, tolerance: float
) -> None:
    ahead = estimates(alpha, k, b, lambda *_: V, lambda _: k * step)["ahead"]
    simulated = 0.0
    for least in range(k + 1):
        tokens, seconds = simulation.ahead(
            alpha, k, b, V, step, 2 * k + 1, passes=10_000 // b, least=least
        )
        simulated = max(simulated, b * tokens / seconds)
    assert ahead.rate == pytest.approx(simulated, rel=tolerance)


def test_a_draft_far_ahead_survives_a_pass_if_all_verified_tokens_agree() -> None:
    ahead = flat(0.97, b=1000, d=0.016)["ahead"]
    assert ahead.seconds == V  # no pass waits
    dies = 1 - 0.97**5
    assert dies == pytest.approx(1 - 0.86, abs=0.005)
    # After a rejection the request has one pass without a draft. Meanwhile the next draft begins
    # with a guess of that pass's token, and survives if the guess was right.
    empty = dies / (dies + 0.97)
    assert ahead.tokens == pytest.approx(empty + (1 - empty) * expected_tokens(0.97, 4))


def test_without_agreement_each_pipeline_yields_one_token_per_pass() -> None:
    found = flat(0.0, again=0.0)
    assert {estimate.tokens for estimate in found.values()} == {1.0}
    assert found["ahead"].seconds == V  # it does not wait for drafts


def test_with_full_agreement_and_fast_drafts_all_draft_tokens_are_accepted() -> None:
    found = flat(1.0, d=0.004)
    assert found["sequential"].tokens == found["halves"].tokens == 5.0
    assert found["ahead"].tokens == pytest.approx(5.0)
    assert found["ahead"].seconds == pytest.approx(V)


def test_ahead_equals_sequential_if_drafts_take_no_time() -> None:
    found = flat(0.9, d=0.0)
    assert found["ahead"].tokens == pytest.approx(found["sequential"].tokens)
    assert found["ahead"].seconds == found["sequential"].seconds == V


def test_halves_lose_and_ahead_gains_where_verify_time_is_flat() -> None:
    found = rates(0.97, 4, 8, lambda *_: V, lambda _: D)
    assert found["halves"] < found["sequential"] < found["ahead"]


def test_halves_gain_where_both_times_grow_with_the_requests() -> None:
    found = rates(0.7, 4, 16, lambda b, _: 0.005 * b, lambda b: 0.005 * b)
    assert found["halves"] == pytest.approx(2 * found["sequential"])
    assert found["halves"] > found["ahead"]


def _draft(seconds: float, b: int) -> float:
    return seconds * (0.8 + 0.2 * b)


@pytest.mark.parametrize("k", [1, 4, 15])
@pytest.mark.parametrize("b", [1, 2, 8, 64])
def test_ahead_is_never_behind_sequential(k: int, b: int) -> None:
    for alpha, d in itertools.product(ALPHAS, (0.0005, 0.005, 0.02, 0.1)):
        found = rates(alpha, k, b, verify, partial(_draft, k * d))
        assert found["ahead"] >= 0.999 * found["sequential"]


@pytest.mark.parametrize("pipeline", ["sequential", "halves", "ahead", "queue"])
def test_more_agreement_or_faster_drafts_never_reduce_throughput(pipeline: str) -> None:
    by_alpha = [
        estimates(alpha / 50, 4, 8, verify, draft, again=0.5)[pipeline].rate for alpha in range(51)
    ]
    by_draft = [flat(0.9, d=d / 1000)[pipeline].rate for d in range(60, 0, -1)]
    for lower, higher in (*itertools.pairwise(by_alpha), *itertools.pairwise(by_draft)):
        assert higher >= lower * 0.999


def test_queue_speculation_waits_for_no_drafts() -> None:
    found = flat(0.97, d=100.0)
    assert found["queue"].seconds == V
    assert found["queue"].tokens > 4


def test_an_overhead_is_part_of_every_round() -> None:
    without = estimates(0.9, 4, 8, verify, lambda _: 0.0, again=0.5)
    found = estimates(0.9, 4, 8, verify, lambda _: 0.0, again=0.5, overhead=0.01)
    for name, estimate in found.items():
        assert estimate.seconds == pytest.approx(without[name].seconds + 0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": 1.2}, "alpha is 1.2, but must be from 0 to 1"),
        ({"k": -1}, "k is -1, but must be at least 0"),
        ({"b": 0}, "the number of requests is 0, but must be at least 1"),
        ({"lookahead": 3}, "lookahead is 3, but must be at least k, which is 4"),
        ({"again": 2.0}, "again is 2.0, but must be from 0 to 1"),
    ],
)
def test_an_impossible_parameter_is_refused(wrong: dict[str, float], message: str) -> None:
    given: dict[str, Any] = {
        "alpha": 0.9,
        "k": 4,
        "b": 8,
        "verify_seconds": verify,
        "draft_seconds": draft,
    }
    with pytest.raises(TheoryError, match=message):
        estimates(**{**given, **wrong})
