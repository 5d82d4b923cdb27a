"""All ranks of a target take the tokens that rank 0 has drawn, whatever they have drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.sample import sample
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.trie import DraftTrees, Source
from test.engine.passes import toy
from test.engine.passes.toy import Batch, Request

COUNT = 40


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with toy.engine():
        sampling_seeds.install()
        yield


class Group:
    """The group of two ranks on one of them; rank 0 broadcasts before rank 1 does."""

    world_size = 2
    device_group = None

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self._rank, self._sent = rank, sent

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        assert src == 0
        if self._rank == src:
            self._sent.append(tensor.clone())
            return tensor
        return tensor.copy_(self._sent.pop(0))


def batch_of(rank: int) -> Any:
    """Requests with other sampling seeds on each rank, as secret seeds are."""
    return Batch([Request({"temperature": 2.0}, COUNT * rank + row) for row in range(COUNT)])


def plain(rank: int) -> list[Any]:
    batch = batch_of(rank)
    with batch.forward(), sampling_seeds.seeded_draws(batch):
        return toy._sampled(batch).tolist()


def verified(rank: int) -> list[Any]:
    batch = batch_of(rank)
    width = toy.VOCAB + 1
    tokens = np.array([[toy.FIRST, *range(toy.VOCAB)]] * COUNT, np.int32)
    trees = DraftTrees(
        tokens,
        np.zeros_like(tokens),
        np.full(tokens.shape, Source.STEP, np.uint8),
        np.ones(tokens.shape, np.float32),
        np.full(COUNT, width, np.int32),
    )
    verify_input = verify_input_of(trees, batch.seq_lens, "cpu", full_mask=False)
    logits: Any = SimpleNamespace(next_token_logits=toy.LOGITS[verify_input.input_ids])
    with batch.forward(), sampling_seeds.seeded_draws(batch):
        found = sample_and_accept(verify_input, batch, logits)
    assert torch.equal(found[1], torch.full((COUNT,), 2)), "each token has a draft"
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize("draw", [plain, verified])
def test_rank_1_takes_what_rank_0_has_drawn(
    draw: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Tensor] = []
    drawn, alone = draw(0), draw(1)
    assert drawn != alone
    for rank in range(2):
        parallel = SimpleNamespace(tp_group=Group(rank, sent))
        for module in (sample, sampling_seeds):
            monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
        assert draw(rank) == drawn
