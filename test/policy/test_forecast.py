"""The forecast of step drafts follows the times of passes and steps."""

from __future__ import annotations

from functools import partial

import pytest

from sglang_qspec.policy.forecast import Forecast, forecast

WHOLE_S = 0.02
"""A pass without drafts while the sidecar does not draft."""
of = partial(
    forecast,
    plain_seconds=WHOLE_S,
    verify_seconds=lambda _requests, _width: 1.5 * WHOLE_S,
    agreement=0.9,
    widest=8,
    lookahead=16,
    shares_device=False,
)


def over_plain(found: Forecast) -> float:
    return found.drafts / found.plain


@pytest.mark.parametrize("requests", [1, 2, 8])
@pytest.mark.parametrize(("step", "pays"), [(0.002, True), (2 * WHOLE_S, False)])
def test_fast_steps_pay_and_slow_ones_do_not(requests: int, step: float, pays: bool) -> None:
    found = of(requests, step_times=[(1.0, step), (8.0, 2 * step)])
    assert found.plain == pytest.approx(requests / WHOLE_S)
    assert (over_plain(found) > 1.5) is pays
    assert (over_plain(found) < 0.9) is not pays


def test_wrong_drafts_do_not_pay() -> None:
    assert over_plain(of(2, step_times=[(1.0, 0.002)], agreement=0.05)) < 0.9


def test_what_the_sidecar_reads_costs_drafts() -> None:
    """With `share` of the time for reading, that share of the passes has no drafts."""
    step = [(1.0, 0.002), (8.0, 0.004)]
    drafts, undrafted, each = of(2, step_times=step).drafts, 2 / (1.5 * WHOLE_S), 0.002
    found = of(2, step_times=step, read_seconds=each).drafts
    share = each * found
    assert 0.0 < share < 1.0
    assert found == pytest.approx(share * undrafted + (1 - share) * drafts)


def test_long_prompts_and_short_answers_leave_no_time_for_drafts() -> None:
    assert over_plain(of(2, step_times=[(1.0, 0.002)], read_seconds=1.0)) == pytest.approx(1 / 1.5)


def test_on_one_device_a_pass_and_its_drafts_take_turns() -> None:
    apart, shared = (
        over_plain(of(2, step_times=[(1.0, WHOLE_S / 2)], shares_device=shares))
        for shares in (False, True)
    )
    assert shared < apart


def test_one_token_of_a_request_leaves_no_room_for_drafts() -> None:
    assert over_plain(of(2, step_times=[(1.0, 0.002)], widest=1)) == pytest.approx(1 / 1.5)
