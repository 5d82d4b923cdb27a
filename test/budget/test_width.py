"""The common width of a pass."""

from __future__ import annotations

import pytest

from sglang_qspec.budget import LADDER, WidthPolicy
from sglang_qspec.errors import ConfigError
from sglang_qspec.trie import DraftTree, DraftTrees, Source


def chain(*scores: float) -> DraftTree:
    size = len(scores) + 1
    return DraftTree(
        tuple(range(size)), (0, *range(size - 1)), (Source.QUEUE,) * size, (1.0, *scores)
    )


def width_for(policy: WidthPolicy, trees: list[DraftTree]) -> int:
    return policy.width_for(DraftTrees.of(trees, policy.max_width))


def test_without_drafts_a_pass_is_plain_decoding() -> None:
    assert width_for(WidthPolicy(8), [chain(), chain()]) == 1
    assert width_for(WidthPolicy(8), []) == 1


def test_likely_drafts_are_verified_whole() -> None:
    assert width_for(WidthPolicy(8), [chain(*[0.9] * 7)]) == 8


def test_the_width_is_a_step_of_the_ladder_or_the_maximum() -> None:
    for maximum in range(1, 20):
        for size in range(20):
            width = width_for(WidthPolicy(maximum), [chain(*[0.9] * size)])
            assert width <= maximum
            assert width in (*LADDER, maximum)


def test_a_draft_that_is_not_worth_its_row_is_left_out() -> None:
    assert width_for(WidthPolicy(8, row_cost=0.05), [chain(0.9, 0.8, 0.02, 0.01)]) == 3
    assert width_for(WidthPolicy(8, row_cost=0.05), [chain(0.04)]) == 1
    assert width_for(WidthPolicy(8, row_cost=0.0), [chain(0.04)]) == 2


def test_one_request_s_long_tree_pays_only_in_a_small_batch() -> None:
    policy, long = WidthPolicy(8), chain(*[0.9] * 7)
    assert width_for(policy, [long]) == 8
    assert width_for(policy, [long, *[chain()] * 40]) == 1


def test_the_more_requests_the_likelier_must_a_draft_be() -> None:
    policy, doubtful = WidthPolicy(8, row_cost=0.03), chain(*[0.3] * 7)
    assert width_for(policy, [doubtful]) == 8
    assert width_for(policy, [doubtful] * 12) == 1


def test_a_fixed_width_is_always_the_maximum() -> None:
    assert width_for(WidthPolicy(8, fixed=True), [chain()]) == 8


@pytest.mark.parametrize(("maximum", "cost"), [(0, 0.03), (8, -0.1)])
def test_settings_out_of_range_are_refused(maximum: int, cost: float) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        WidthPolicy(maximum, row_cost=cost)
