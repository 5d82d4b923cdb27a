"""The choice of the rows of a ragged pass, and of the requests that get them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import PASS_ROWS, RowBudget, WidthPolicy, spend
from sglang_qspec.policy.pass_times import FIRST_GAP
from sglang_qspec.policy.row_budget import ROW_LADDER
from sglang_qspec.trie import DraftTree, DraftTrees
from test.policy.chains import chain, linear


def lengths_for(budget: RowBudget, trees: list[DraftTree], width: int = 16) -> list[int]:
    lengths: list[int] = budget.choose(DraftTrees.of(trees, width).scores).lengths.tolist()
    return lengths


def test_without_drafts_every_request_has_its_own_row_alone() -> None:
    assert lengths_for(RowBudget(16), [chain(), chain()]) == [1, 1]
    assert RowBudget(16).choose(DraftTrees.of([chain()], 16).scores).width == 1
    assert RowBudget(16).choose(DraftTrees.of([], 16).scores).width == 1


def test_rows_go_to_the_likeliest_tokens_of_all_requests() -> None:
    trees = [chain(0.9, 0.8, 0.7), chain(0.3, 0.2), chain(), chain(0.75, 0.1)]
    assert lengths_for(RowBudget(16, times=linear(0.4)), trees) == [4, 1, 1, 2]


def test_a_hopeless_request_costs_the_others_no_rows() -> None:
    """With one width, nine rows would be padding."""
    trees = [chain(*[0.9] * 9), *[chain()] * 3]
    budget, uniform = RowBudget(16, times=linear(0.3)), WidthPolicy(16, times=linear(0.3))
    assert lengths_for(budget, trees) == [10, 1, 1, 1]
    assert uniform.choose(DraftTrees.of(trees, 16).scores).width == 1


def test_a_draft_token_that_costs_more_than_it_gains_is_left_out() -> None:
    assert lengths_for(RowBudget(8, times=linear(0.05)), [chain(0.9, 0.8, 0.02)]) == [3]
    assert lengths_for(RowBudget(8, times=linear(0.05)), [chain(0.04)]) == [1]
    assert lengths_for(RowBudget(8, times=linear(0.0)), [chain(0.04)]) == [2]


def test_a_factor_moves_rows_from_a_request_whose_drafts_failed() -> None:
    trees = DraftTrees.of([chain(0.8, 0.8), chain(0.7, 0.7)], 8)
    budget = RowBudget(8, times=linear(0.4))
    assert budget.choose(trees.scores).lengths.tolist() == [3, 3]
    doubted = budget.choose(trees.scores, np.array([0.2, 1.0]))
    assert doubted.lengths.tolist() == [1, 3]
    assert doubted.tokens == pytest.approx(2 + 1.4)


def test_one_request_with_a_certain_draft_gets_64_rows() -> None:
    assert lengths_for(RowBudget(64), [chain(*[0.999] * 63)], 64) == [64]


def test_a_request_gets_at_most_the_maximum() -> None:
    budget = RowBudget(8)
    assert lengths_for(budget, [chain(*[0.9] * 15)]) == [8]
    budget.limit(3)
    assert lengths_for(budget, [chain(*[0.9] * 15)]) == [3]
    with pytest.raises(ConfigError, match="max_width is 0"):
        budget.limit(0)


def test_a_fixed_budget_takes_all_nodes_and_no_padding() -> None:
    budget = RowBudget(8, times=linear(9.0), fixed=True)
    assert lengths_for(budget, [chain(0.1, 0.1), chain(), chain(*[0.1] * 15)]) == [3, 1, 8]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_large_batch_has_fewer_rows_for_each_request(*, fixed: bool) -> None:
    budget = RowBudget(64, times=linear(0.0), fixed=fixed)
    assert sum(lengths_for(budget, [chain(*[1.0] * 63)] * 48, 64)) == PASS_ROWS


def test_the_total_is_a_step_of_the_ladder_or_all_that_the_trees_have() -> None:
    budget = RowBudget(64, times=linear(0.0))
    for requests in (1, 3, 17):
        for size in range(1, 40, 3):
            rows = sum(lengths_for(budget, [chain(*[0.9] * size)] * requests, 64))
            assert rows == min(requests * (1 + size), ROW_LADDER[-1])
    steep = RowBudget(64, times=linear(0.2))
    falling = np.geomspace(1.0, 0.05, 63).tolist()
    for requests in range(1, 30, 4):
        rows = sum(lengths_for(steep, [chain(*falling)] * requests, 64))
        assert rows in ROW_LADDER


def test_a_pass_fills_its_captured_total_with_draft_tokens() -> None:
    """Rows beyond those that pay would be padding of the CUDA graph, and cost nothing more."""
    falling = np.geomspace(1.0, 0.05, 63).tolist()
    budget = RowBudget(64, times=linear(0.2))
    free = sum(lengths_for(budget, [chain(*falling)] * 3, 64))
    budget.totals = (free - 7, free + 7)
    assert sum(lengths_for(budget, [chain(*falling)] * 3, 64)) in budget.totals
    assert lengths_for(budget, [chain(0.9, 0.9)], 64) == [3]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_pass_has_at_most_the_largest_captured_total(*, fixed: bool) -> None:
    budget = RowBudget(64, times=linear(0.0), fixed=fixed, totals=(8, 16))
    assert sum(lengths_for(budget, [chain(*[0.9] * 15)] * 4, 64)) == 16
    assert lengths_for(budget, [chain(0.9)] * 17, 64) == [1] * 17


def test_a_plain_pass_runs_at_intervals() -> None:
    budget, trees = RowBudget(16), [chain(*[0.9] * 15)]
    for _ in range(FIRST_GAP):
        assert lengths_for(budget, trees) == [16]
        budget.times.observe(1, 16, 0.03)
    assert lengths_for(budget, trees) == [1]


def test_the_choice_cuts_each_tree_to_its_own_length() -> None:
    trees = DraftTrees.of([chain(0.9, 0.8), chain(0.1)], 8)
    cut = RowBudget(8, times=linear(0.5)).choose(trees.scores).cut(trees)
    assert cut.ragged
    assert cut.sizes.tolist() == [3, 1]


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=7), min_size=1, max_size=5),
    st.integers(0, 30),
)
def test_the_spent_rows_are_the_best_there_are(scores: list[list[float]], drafts: int) -> None:
    trees = DraftTrees.of([chain(*sorted(row, reverse=True)) for row in scores], 8)
    gains = trees.scores.astype(np.float64)
    lengths = spend(gains, drafts)
    everything = sorted((score for row in scores for score in row), reverse=True)
    assert lengths.sum() == len(scores) + min(drafts, len(everything))
    assert (lengths <= trees.sizes).all()
    won = sum(gains[row, 1:length].sum() for row, length in enumerate(lengths.tolist()))
    assert won == pytest.approx(sum(everything[:drafts]), rel=1e-6)
