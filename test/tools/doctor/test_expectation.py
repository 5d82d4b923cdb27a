"""The prediction follows the measured times, and never promises passes that nobody measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.doctor.expectation import IN_FLIGHT, MOST_ROWS, paragraph, predict
from sglang_qspec.tools.measure.pair import DRAFT_ROWS, VERIFY_ROWS, Measured
from sglang_qspec.tools.measure.tables import Slowdown
from sglang_qspec.tools.theory.prediction import Prediction

AGREED = [place % 5 > 0 for place in range(300)]
"""The draft model misses every fifth token."""


def times(verify: Callable[[int], float], draft: float = 1e-3) -> Measured:
    """A target with passes of `verify` seconds by rows, and a drafter with steps of `draft`."""
    curve = Curve.through((rows, verify(rows)) for rows in VERIFY_ROWS)
    steps = Curve.through((rows, draft) for rows in DRAFT_ROWS)
    return Measured(curve, curve, steps, Slowdown(), [AGREED])


FLAT = times(lambda _: 0.03)
"""Larger passes cost nothing more, as on a GPU."""
STEEP = times(lambda rows: 0.03 * rows, draft=0.02)
"""A pass over two rows takes twice the time."""


def of(predicted: list[Prediction], in_flight: int) -> Prediction:
    return next(each for each in predicted if each.in_flight == in_flight)


def test_where_rows_are_free_drafts_gain_and_drafting_ahead_hides_their_time() -> None:
    predicted = predict(FLAT, 15)
    assert [each.in_flight for each in predicted] == list(IN_FLIGHT)
    assert all(each.speedup > 2 for each in predicted)
    assert of(predicted, 1).pipeline == "ahead"
    assert of(predicted, 1).plain_tokens_per_s == 1 / 0.03
    words = paragraph(FLAT, predicted)
    assert f"{of(predicted, 1).speedup:.1f} with 1" in words
    assert "80 % of 300 tokens" in words
    assert "do not pay" not in words


def test_where_each_row_costs_a_pass_no_draft_pays_and_the_paragraph_says_so() -> None:
    predicted = predict(STEEP, 15)
    assert all(each.speedup < 1 for each in predicted)
    assert "start the server without a draft model" in paragraph(STEEP, predicted)


def test_the_rows_of_a_predicted_pass_were_measured() -> None:
    for each in predict(FLAT, 63):
        assert each.in_flight * (each.draft_tokens + 1) <= MOST_ROWS == max(VERIFY_ROWS)
    assert all(each.draft_tokens <= 3 for each in predict(FLAT, 3))


APART = times(lambda _: 0.03, draft=0.006)


@pytest.mark.parametrize(
    "slowed",
    [replace(APART, slowdown=slowdown) for slowdown in (Slowdown(verify=8.0), Slowdown(draft=8.0))],
)
def test_what_the_models_cost_each_other_counts_where_both_run_at_once(slowed: Measured) -> None:
    assert of(predict(APART, 15), 1).pipeline == "ahead"
    assert of(predict(slowed, 15), 1).pipeline == "sequential"
    assert of(predict(slowed, 15), 1).speedup < of(predict(APART, 15), 1).speedup


def test_a_draft_pays_only_against_the_target_on_all_its_cpus() -> None:
    """The target's passes beside a sidecar are slower, because they have fewer CPUs."""
    fewer = replace(FLAT, plain=Curve.through((rows, 0.01) for rows in VERIFY_ROWS))
    assert of(predict(fewer, 15), 1).plain_tokens_per_s == 100
    assert of(predict(fewer, 15), 1).speedup < 0.5 * of(predict(FLAT, 15), 1).speedup
