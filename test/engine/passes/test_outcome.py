"""Accepted nodes and tokens of a verify pass, read from SGLang's tensors."""

from types import SimpleNamespace

import numpy as np
import torch

from sglang_qspec.engine.passes.outcome import (
    ComingOutcome,
    ComingTokens,
    Outcome,
)


def outcome_of(accept_index: list[list[int]], width: int = 3) -> Outcome:
    """The outcome of trees of `width` nodes; the token after node i of the batch is 100 + i."""
    lens = [sum(node >= 0 for node in row) for row in accept_index]
    return ComingOutcome(
        torch.arange(100, 100 + len(accept_index) * width, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(accept_index, dtype=torch.int32),
        np.arange(len(accept_index)) * width,
    ).read()


def test_nodes_count_from_the_root_of_their_own_tree() -> None:
    outcome = outcome_of([[0, 2, -1], [3, -1, -1], [6, 7, 8]])
    assert outcome.accepted_nodes == [[2], [], [1, 2]]
    assert outcome.bonus_ids == [102, 103, 108]
    assert outcome.tokens == [[100, 102], [103], [106, 107, 108]]


def test_a_pass_without_drafts_gives_one_token_each() -> None:
    result = SimpleNamespace(next_token_ids=torch.tensor([7, 8]))
    outcome = ComingTokens(result, copied=False).read()
    assert outcome.accepted_nodes == [[], []]
    assert outcome.bonus_ids == [7, 8]
    assert outcome.tokens == [[7], [8]]


def test_tokens_that_sglang_copies_are_read_once_its_copy_is_complete() -> None:
    def complete() -> None:
        result.next_token_ids = torch.tensor([7, 8])

    result = SimpleNamespace(next_token_ids=None, copy_done=None)
    coming = ComingTokens(result, copied=True)
    result.copy_done = SimpleNamespace(synchronize=complete)
    assert coming.read().bonus_ids == [7, 8]


def test_only_the_first_nodes_of_each_tree_have_their_kv_in_place() -> None:
    assert outcome_of([[0, 1, -1], [3, -1, -1], [6, 7, 8]]).is_prefix
    assert not outcome_of([[0, 1, -1], [3, 5, -1]]).is_prefix
    # A path may be shorter than the tree is wide.
    assert outcome_of([[0, 1], [3, -1]]).is_prefix
