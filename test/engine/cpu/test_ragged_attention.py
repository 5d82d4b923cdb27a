"""Attention over trees of different sizes equals attention over each request's tree alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_qspec.cpu import pass_plan
from sglang_qspec.engine.cpu.attention import _Batch
from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.trie import DraftTrees
from test.trees import random_tree

SLOTS, KV_HEADS, HEADS, DIM = 600, 2, 6, 8
LAYER: Any = SimpleNamespace(sliding_window_size=-1, logit_cap=0.0, scaling=DIM**-0.5)


def attend(trees: DraftTrees, lens: list[int], slots: Tensor, query: Tensor, layer: Any) -> Tensor:
    """The attention of a verify pass after texts of `lens` tokens, whose KV is in `slots`."""
    random_cache = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=random_cache)
    seq_lens = torch.tensor(lens)
    spec_info = verify_input_of(trees, seq_lens, "cpu", full_mask=False)
    forward_batch: Any = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=spec_info,
        seq_lens=seq_lens,
        req_pool_indices=torch.arange(len(lens)),
        out_cache_loc=torch.zeros(trees.rows, dtype=torch.int64),
    )
    return _Batch(forward_batch, slots).attend(query, keys, values, layer)


@pytest.mark.parametrize("saved", [1, 10_000])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize(
    ("lens", "sizes"),
    [
        ([40], [5]),
        ([7, 90, 3], [4, 4, 4]),
        ([7, 90, 3, 60], [1, 8, 3, 2]),
        ([1, 1, 50, 40, 45, 2], [12, 1, 1, 1, 2, 2]),
        ([60, 50, 40, 30], [2, 2, 9, 9]),
    ],
)
def test_a_ragged_pass_equals_a_pass_of_each_request(
    lens: list[int],
    sizes: list[int],
    window: int,
    shared: bool,
    saved: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `saved` 1 every difference of sizes makes two groups; with 10,000 there is one group."""
    monkeypatch.setattr(pass_plan, "_FEWEST_SAVED", saved)
    monkeypatch.setattr(pass_plan, "_SAVED", 1)
    rng, generator = random.Random(5), torch.Generator().manual_seed(2)
    trees = DraftTrees.of([random_tree(rng, 12) for _ in lens], 12).cut(np.array(sizes))
    slots = torch.stack([torch.randperm(SLOTS, generator=generator) for _ in lens]).int()
    if shared:
        for row, length in enumerate(lens):
            slots[row, : min(length, 35)] = slots[0, : min(length, 35)]
    query = torch.randn(sum(sizes), HEADS, DIM, generator=generator)
    layer = SimpleNamespace(**{**vars(LAYER), "sliding_window_size": window})
    output = attend(trees, lens, slots, query, layer)
    for row, start in enumerate(trees.starts.tolist()):
        rows = slice(start, start + sizes[row])
        alone = DraftTrees.of([trees[row]], sizes[row])
        expected = attend(alone, lens[row : row + 1], slots[row : row + 1], query[rows], layer)
        torch.testing.assert_close(output[rows], expected)


def test_short_prompts_of_different_lengths_equal_each_prompt_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_plan, "_FEWEST_SAVED", 4)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, DIM, generator=generator)
    new, cached = [3, 20, 1, 18, 2], [0, 5, 70, 0, 9]
    slots = torch.stack([torch.randperm(SLOTS, generator=generator) for _ in new]).int()
    query = torch.randn(sum(new), HEADS, DIM, generator=generator)

    def attend_prompts(rows: list[int], query: Tensor) -> Tensor:
        lens = torch.tensor([new[row] + cached[row] for row in rows])
        forward_batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            spec_info=None,
            seq_lens=lens,
            req_pool_indices=torch.tensor(rows),
            out_cache_loc=torch.zeros(len(query), dtype=torch.int64),
            extend_seq_lens_cpu=[new[row] for row in rows],
            extend_seq_lens=None,
        )
        return _Batch(forward_batch, slots).attend(query, keys, values, LAYER)

    output = attend_prompts([0, 1, 2, 3, 4], query)
    start = 0
    for row, length in enumerate(new):
        own = slice(start, start + length)
        torch.testing.assert_close(output[own], attend_prompts([row], query[own]))
        start += length
