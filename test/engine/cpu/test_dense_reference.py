"""Attention over random trees equals a dense softmax over the text that each node continues.

The text of a node is its request's committed tokens and the path from the root to the node. A
window, a logit cap and sinks apply to this text as to any other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_qspec.cpu import attention, pass_plan
from sglang_qspec.engine.cpu.attention import _Batch
from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.trie import DraftTree, DraftTrees
from test.trees import random_tree

SLOTS, WIDTH = 600, 16


@dataclass
class Case:
    """A layer with its cache and the slots of the requests' texts, all drawn from a seed."""

    layer: Any
    keys: Tensor
    values: Tensor
    sinks: Tensor | None
    slots: Tensor
    lens: list[int]

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        latent = rng.random() < 0.25
        kv_heads, dim = (1, 24) if latent else (rng.choice([1, 2]), 8)
        keys, values = torch.randn(2, SLOTS, kv_heads, dim)
        group = rng.choice([1, 3])
        window = rng.choice([-1, *range(1, 32)])
        layer = SimpleNamespace(
            sliding_window_size=window,
            logit_cap=rng.choice([0.0, 0.7]),
            scaling=dim**-0.5,
            heads=kv_heads * group,
        )
        lens = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 5))]
        slots = torch.stack([torch.randperm(SLOTS) for _ in lens]).int()
        if rng.random() < 0.5:
            slots[:, : min(lens)] = slots[0, : min(lens)].clone()
        sinks = torch.randn(layer.heads) if rng.random() < 0.5 else None
        # The values of latent attention are a part of its keys.
        return cls(layer, keys, keys[..., :16] if latent else values, sinks, slots, lens)

    def query(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.layer.heads, self.keys.shape[2])

    def attend(self, query: Tensor, **forward_batch: Any) -> Tensor:
        shared: dict[str, Any] = {
            "req_pool_indices": torch.arange(len(self.lens)),
            "out_cache_loc": torch.zeros(len(query), dtype=torch.int64),
        }
        batch = _Batch(SimpleNamespace(**shared, **forward_batch), self.slots)
        return batch.attend(query, self.keys, self.values, self.layer, self.sinks)

    def dense(self, query: Tensor, text: Tensor) -> Tensor:
        """The attention of `query` [heads, dim], the last token of the text in the slots `text`."""
        layer = self.layer
        seen = text if layer.sliding_window_size < 0 else text[-1 - layer.sliding_window_size :]
        group = layer.heads // self.keys.shape[1]
        key, value = (
            buffer[seen.long()].repeat_interleave(group, 1) for buffer in (self.keys, self.values)
        )
        scores = torch.einsum("hd,thd->ht", query, key) * layer.scaling
        if layer.logit_cap:
            scores = layer.logit_cap * (scores / layer.logit_cap).tanh()
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.unsqueeze(1)], 1)
        return torch.einsum("ht,thd->hd", scores.softmax(1)[:, : len(seen)], value)


def path(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [*(path(tree, tree.parents[node]) if node else []), node]


@pytest.fixture(autouse=True)
def _every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny passes share prefixes, divide their requests, and split their prompts."""
    monkeypatch.setattr(pass_plan, "_SAVED", 1)
    monkeypatch.setattr(pass_plan, "_SHARED", 4)
    monkeypatch.setattr(pass_plan, "_FEWEST_SAVED", 4)
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_each_node_of_a_tree_sees_the_text_that_it_continues(seed: int, ragged: bool) -> None:
    case, rng = Case.of(seed), random.Random(-seed)
    trees = DraftTrees.of([random_tree(rng, rng.randrange(1, WIDTH)) for _ in case.lens], WIDTH)
    if ragged:
        trees = trees.cut(np.full(len(trees), WIDTH))
    seq_lens = torch.tensor(case.lens)
    query = case.query(trees.rows)
    output = case.attend(
        query,
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=verify_input_of(trees, seq_lens, "cpu", full_mask=False),
        seq_lens=seq_lens,
    )
    rows, expected = [], []
    for row, (length, start) in enumerate(zip(case.lens, trees.starts.tolist(), strict=True)):
        for node in range(trees.sizes[row]):
            places = [*range(length), *(length + step for step in path(trees[row], node))]
            rows.append(start + node)
            expected.append(case.dense(query[start + node], case.slots[row, places]))
    torch.testing.assert_close(output[rows], torch.stack(expected))


@pytest.mark.parametrize("longest", [20, 60], ids=["padded", "in_blocks"])
@pytest.mark.parametrize("seed", range(20))
def test_each_token_of_a_prompt_sees_the_text_before_it(seed: int, longest: int) -> None:
    case, rng = Case.of(seed), random.Random(-seed)
    new = [longest, *(rng.randint(1, longest) for _ in case.lens[1:])]
    lens = [length + added for length, added in zip(case.lens, new, strict=True)]
    query = case.query(sum(new))
    output = case.attend(
        query,
        forward_mode=ForwardMode.EXTEND,
        spec_info=None,
        seq_lens=torch.tensor(lens),
        extend_seq_lens_cpu=new,
        extend_seq_lens=None,
    )
    texts = [
        case.slots[row, : own + 1]
        for row, length in enumerate(case.lens)
        for own in range(length, lens[row])
    ]
    expected = [case.dense(one, text) for one, text in zip(query, texts, strict=True)]
    torch.testing.assert_close(output, torch.stack(expected))
