"""While no request waits, drafts are worth what they save of the batch, besides their tokens."""

from __future__ import annotations

from typing import Any

from sglang_qspec.policy import DraftTrials, passes_left
from sglang_qspec.policy.forecast import Forecast
from test.policy.trial_loads import ALL, NONE, TEXTS, rates, serve, share

UNEVEN = rates(80, 110, 100)
"""Lookups give 1.1 times the tokens of plain decoding, and none of them to the last request."""


def test_drafts_that_do_not_help_the_last_request_do_not_pay_at_the_end() -> None:
    # A pass over ten requests takes 0.1 s, and gives each of them a token.
    assert share(serve(DraftTrials(2.0), UNEVEN, 300, requests=10), TEXTS) > 0.9
    found = serve(DraftTrials(2.0), UNEVEN, 300, requests=10, weight=0.5, last=0.8)
    assert share(found, NONE) > 0.9


def test_drafts_that_help_all_requests_alike_pay_at_the_end_too() -> None:
    load = rates(150, 110, 100)
    found = serve(DraftTrials(2.0), load, 300, requests=10, weight=0.5, last=1.5, plain_rate=100)
    assert share(found, ALL) > 0.8


def test_the_end_of_a_load_decides_by_what_was_measured_before() -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, UNEVEN, 60, requests=10, last=0.8))
    assert share(serve(trials, UNEVEN, 5, requests=10, weight=0.9, last=0.8), NONE) > 0.6
    assert share(serve(trials, UNEVEN, 20, requests=10, last=0.8), TEXTS) > 0.7


def test_a_sidecar_is_not_tried_if_the_batch_ends_first() -> None:
    load = rates(150, 100, 90)
    settled = DraftTrials(2.0)
    list(serve(settled, rates(80, 100, 90), 60, requests=10))
    short = serve(settled, load, 200, requests=10, reading=4.0, left=5.0)
    assert share(short, ALL) == 0.0
    assert share(serve(settled, load, 200, requests=10, reading=4.0, left=6.0), ALL) > 0.3


def test_a_sidecar_that_would_read_until_the_end_of_a_batch_gets_no_cores() -> None:
    load = rates(150, 100, 90)
    trials = DraftTrials(2.0, lambda _requests: Forecast(150.0, 90.0, cold=60.0))
    assert share(serve(trials, load, 60, requests=10)) > 0.8

    def batch(left: float, certainty: float, seconds: float = 2.0) -> float:
        trials.arrive()
        more: Any = {"reading": 4.0, "left": left, "certainty": certainty}
        return share(serve(trials, load, seconds, requests=10, **more))

    assert batch(5.0, 0.9) < 0.2, "the first rounds end what the last batch began"
    assert batch(5.0, 0.9) == 0.0
    assert batch(5.0, 0.1) > 0.8, "others will come"
    assert batch(20.0, 0.9) == 1.0
    assert batch(5.0, 0.9) < 0.2
    assert batch(20.0, 0.9, 6.0) > 0.8
    more: Any = {"reading": 4.0, "left": 5.0, "certainty": 0.9}
    assert share(serve(trials, load, 2, requests=10, **more)) == 1.0, "it has read"


def test_other_trials_go_on_while_that_of_the_sidecar_would_outlast_the_batch() -> None:
    trials = DraftTrials(2.0)
    assert share(serve(trials, rates(80, 100, 90), 300, requests=10, left=1.0), ALL) == 0.0
    assert share(serve(trials, rates(80, 100, 150), 300, requests=10, left=1.0), NONE) > 0.5


def test_drafts_that_were_right_are_expected_to_save_more_passes() -> None:
    assert passes_left(100, 1, 0) == 100.0
    assert 50.0 < passes_left(100, 20, 10) < passes_left(100, 20, 1) < 100.0
    assert passes_left(0, 20, 10) == 0.0
