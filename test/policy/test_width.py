"""The choice of the width that all requests of a pass share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import LADDER, PASS_ROWS, WidthPolicy
from sglang_qspec.policy.pass_times import FIRST_GAP, LONGEST_GAP
from sglang_qspec.trie import DraftTree, DraftTrees
from test.policy.chains import chain, linear


def width_for(policy: WidthPolicy, trees: list[DraftTree]) -> int:
    return policy.choose(DraftTrees.of(trees, policy.max_width).scores).width


def test_without_drafts_a_pass_is_plain_decoding() -> None:
    assert width_for(WidthPolicy(8), [chain(), chain()]) == 1
    assert width_for(WidthPolicy(8), []) == 1


def test_all_tokens_of_a_likely_draft_are_verified() -> None:
    assert width_for(WidthPolicy(8), [chain(*[0.9] * 7)]) == 8


def test_the_width_is_a_step_of_the_ladder_or_the_maximum() -> None:
    for maximum in range(1, 20):
        for size in range(20):
            width = width_for(WidthPolicy(maximum), [chain(*[0.9] * size)])
            assert width <= maximum
            assert width in (*LADDER, maximum)


def test_a_draft_token_that_costs_more_than_it_gains_is_left_out() -> None:
    assert width_for(WidthPolicy(8, times=linear(0.05)), [chain(0.9, 0.8, 0.02, 0.01)]) == 3
    assert width_for(WidthPolicy(8, times=linear(0.05)), [chain(0.04)]) == 1
    assert width_for(WidthPolicy(8, times=linear(0.0)), [chain(0.04)]) == 2


def test_one_request_s_long_tree_pays_only_in_a_small_batch() -> None:
    policy, long = WidthPolicy(8), chain(*[0.9] * 7)
    assert width_for(policy, [long]) == 8
    assert width_for(policy, [long, *[chain()] * 40]) == 1


def test_larger_batches_need_likelier_drafts() -> None:
    policy, doubtful = WidthPolicy(8, times=linear(0.03)), chain(*[0.2] * 7)
    assert width_for(policy, [doubtful]) == 8
    assert width_for(policy, [doubtful] * 12) == 1


def test_the_only_allowed_width_is_always_chosen() -> None:
    assert width_for(WidthPolicy(8, widths=(8,)), [chain()]) == 8
    assert width_for(WidthPolicy(4, widths=(8,)), [chain()]) == 8


def test_only_allowed_widths_are_chosen() -> None:
    certain = chain(*[0.99] * 5)
    policy = WidthPolicy(16, times=linear(0.0))
    assert width_for(policy, [certain]) == 6
    policy.widths = (1, 4, 8, 16)
    assert width_for(policy, [certain]) == 8
    policy.limit(7)
    assert width_for(policy, [certain]) == 4
    assert width_for(policy, [chain()]) == 1


def test_a_plain_pass_is_due_only_where_width_1_is_allowed() -> None:
    certain = chain(*[0.99] * 7)
    for widths, width in (((1, 8), 1), ((4, 8), 8)):
        policy = WidthPolicy(8, widths=widths)
        for _ in range(300):
            policy.times.observe(1, 8, 0.01)
        assert width_for(policy, [certain]) == width


def test_cheap_rows_are_used_and_expensive_rows_only_where_they_pay() -> None:
    policy, doubtful = WidthPolicy(8), chain(*[0.06] * 7)
    assert width_for(policy, [doubtful]) == 8
    assert width_for(policy, [doubtful] * 2) == 4
    assert width_for(policy, [doubtful] * 4) == 2
    assert width_for(policy, [chain(*[0.9] * 7)] * 2) == 8


def test_a_large_batch_has_narrower_passes() -> None:
    certain = [chain(*[1.0] * 63)] * 48
    for widths in (None, (1, 4, 16, 32, 64)):
        policy = WidthPolicy(64, times=linear(0.0), widths=widths)
        assert width_for(policy, certain) == PASS_ROWS // 48
    assert width_for(WidthPolicy(64, times=linear(0.0)), certain[:12]) == 64
    assert width_for(WidthPolicy(64), [chain()] * (PASS_ROWS + 1)) == 1


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_width is 0, but must be at least 1"):
        WidthPolicy(0)


def test_the_expected_rate_follows_the_measured_pass_times() -> None:
    policy = WidthPolicy(8)
    scores = DraftTrees.of([chain()], 8).scores
    for _ in range(200):
        policy.times.observe(1, 1, 0.1)
    assert policy.choose(scores).rate == pytest.approx(10.0, rel=0.01)


def test_a_limit_bounds_the_width_of_later_passes() -> None:
    policy = WidthPolicy(8)
    policy.limit(3)
    assert width_for(policy, [chain(*[0.9] * 2)]) == 3
    assert width_for(policy, [chain(*[0.9] * 7)]) == 3
    with pytest.raises(ConfigError, match="max_width is 0"):
        policy.limit(0)


def test_plain_passes_are_measured_at_intervals_while_drafts_are_good() -> None:
    policy = WidthPolicy(8)
    widths = []
    for _ in range(1000):
        widths.append(width_for(policy, [chain(*[0.9] * 7)]))
        policy.times.observe(1, widths[-1], 0.03)
    plain = [number for number, width in enumerate(widths) if width == 1]
    assert plain[0] == FIRST_GAP
    assert 5 <= len(plain) <= 10
    assert max(after - before for before, after in pairwise(plain)) <= LONGEST_GAP + 1


def test_a_width_is_abandoned_once_plain_decoding_is_measured_faster() -> None:
    policy, doubtful = WidthPolicy(8), [chain(*[0.2] * 7)]
    widths = []
    for _ in range(200):
        widths.append(width_for(policy, doubtful))
        policy.times.observe(1, widths[-1], 0.03 if widths[-1] == 1 else 0.08)
    assert widths[0] > 1
    assert set(widths[100:]) == {1}
