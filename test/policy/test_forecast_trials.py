"""What is forecast of drafts decides before they are measured, and only then."""

from __future__ import annotations

import pytest

from sglang_qspec.policy import DraftTrials, DraftUse
from sglang_qspec.policy.draft_trials import (
    FORECAST_EVERY,
    WARM_UP_S,
)
from sglang_qspec.policy.forecast import Forecast
from sglang_qspec.policy.trial_level import LOSS, WINDOW_S
from test.policy.trial_loads import (
    ALL,
    NONE,
    PASS_S,
    TEXTS,
    rates,
    serve,
    share,
)

COLD = 0.7
"""Tokens per second while the sidecar only reads, over those with all cores for the target."""


def forecast(drafts: float, plain: float) -> Forecast:
    return Forecast(drafts, plain, COLD * plain)


@pytest.mark.parametrize(("worth_at_16", "first"), [(0.6, TEXTS), (1.4, ALL)])
def test_a_new_size_begins_with_what_is_forecast_of_the_difference(
    worth_at_16: float, first: DraftUse
) -> None:
    """With four requests drafts were measured to be worth 1.5 times the target's cores."""
    worth = {4: 1.5, 16: worth_at_16}
    trials = DraftTrials(2.0, lambda requests: forecast(100 * worth.get(requests, 1.5), 100))
    list(serve(trials, rates(150, 100, 90), 60, requests=4))
    trials.arrive()
    assert share(serve(trials, rates(100, 100, 90), 1.0, requests=16), first) > 0.7


@pytest.mark.parametrize(
    ("predicted", "first"), [(0.5, TEXTS), (0.95, TEXTS), (1.1, TEXTS), (1.25, ALL), (2.0, ALL)]
)
def test_only_a_clear_forecast_takes_cores_from_the_target(
    predicted: float, first: DraftUse
) -> None:
    trials = DraftTrials(2.0, lambda requests: forecast(predicted * requests, 1.0 * requests))
    assert share(serve(trials, rates(20, 20), 1.5), first) == 1.0


def test_what_is_forecast_to_pay_a_little_is_tried_within_half_a_minute() -> None:
    trials = DraftTrials(2.0, lambda requests: forecast(110.0 * requests, 100.0 * requests))
    load = {ALL: 130.0, TEXTS: 100.0, NONE: 100.0}
    list(serve(trials, load, 30, requests=1, drafted=0.5))
    assert share(serve(trials, load, 60, requests=1, drafted=0.5)) > 0.9


def test_the_first_trial_of_drafts_that_lose_comes_when_it_loses_little() -> None:
    """A third of the tokens of two seconds is one percent of those of 67 seconds."""
    load = rates(67, 100, 100)
    found = list(serve(DraftTrials(2.0, lambda _: forecast(67, 100)), load, 400, requests=10))
    assert ALL in found
    before = found.index(ALL) * PASS_S
    assert before * LOSS > 0.33 * (WARM_UP_S[ALL] + WINDOW_S[ALL] / 3) * 0.9
    better = DraftTrials(2.0, lambda _: forecast(84, 100))
    sooner = list(serve(better, load, 400, requests=10))
    assert sooner.index(ALL) * PASS_S < before


def test_drafts_that_were_begun_end_when_the_forecast_has_become_clear() -> None:
    """The first passes tell how slow the target is without the sidecar's cores."""
    known = False
    trials = DraftTrials(2.0, lambda _: forecast(10, 20) if known else None)
    load = rates(10, 20)
    assert share(serve(trials, load, 0.5)) == 1.0
    known = True
    list(serve(trials, load, FORECAST_EVERY * PASS_S))
    assert share(serve(trials, load, 30)) == 0.0


def test_texts_that_give_much_keep_the_cores_from_drafts_that_would_give_less() -> None:
    """Here lookups give 3 tokens in a pass, and a forecast of 1.5 times says nothing of them."""
    load = {ALL: 16.0, TEXTS: 30.0, NONE: 10.0}
    trials = DraftTrials(2.0, lambda requests: forecast(15.0 * requests, 10.0 * requests))
    list(serve(trials, load, 60, requests=1))
    begun = DraftTrials(2.0, lambda requests: forecast(15.0 * requests, 10.0 * requests))
    begun._gains = dict(trials._gains)
    assert share(serve(trials, load, 200, requests=1), TEXTS) > 0.95
    assert share(serve(begun, load, 1.5, requests=1), TEXTS) == 1.0


def test_what_was_forecast_is_tried_when_it_is_better_than_what_texts_give() -> None:
    predicted = 9.0
    trials = DraftTrials(2.0, lambda requests: forecast(predicted * requests, 10.0 * requests))
    load = {ALL: 20.0, TEXTS: 10.0, NONE: 10.0}
    assert share(serve(trials, load, 10, requests=1), TEXTS, NONE) == 1.0
    predicted = 20.0
    assert share(serve(trials, load, 10, requests=1, drafted=0.5)) > 0.7


def test_a_sidecar_that_must_read_for_long_is_tried_later() -> None:
    """While it reads, the target has fewer cores and no drafts of it."""
    load = {ALL: 12.0, TEXTS: 10.0, NONE: 10.0}

    def until_trial(reading: float) -> int:
        trials = DraftTrials(2.0, lambda _: forecast(9.0, 10.0))
        return list(serve(trials, load, 600, reading=reading)).index(ALL)

    short, long = until_trial(1.0), until_trial(4.0)
    assert short * PASS_S >= (1 - COLD) * WARM_UP_S[ALL] / LOSS
    assert long * PASS_S >= (1 - COLD) * 4.0 / LOSS
    assert long > short


def test_measured_drafts_do_not_follow_the_forecast() -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60))
    trials._forecast = lambda _: forecast(50, 100)
    assert share(serve(trials, rates(150, 100), 60)) > 0.7
