"""What serving would compile is called before the server is ready."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_qspec.engine.cuda import warm_up
from test.verify.fake_cuda import Costs, fake_cuda


class Pool:
    """A KV pool that notes how many slots are moved, and that they are slot 0."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def get_kvcache(self) -> Pool:
        return self

    def move_kv_cache(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        assert targets.is_cuda
        assert targets.dtype == sources.dtype == torch.int64
        self.moved.append(len(targets))


def target(pool: Pool) -> Any:
    config = SimpleNamespace(vocab_size=300)
    return SimpleNamespace(model_config=config, token_to_kv_pool_allocator=pool)


def test_each_kernel_is_called_on_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool, verified, waited = Pool(), [], []
    monkeypatch.setattr(warm_up, "verify_tree_greedy_func", lambda **given: verified.append(given))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    with fake_cuda(), Costs() as costs:
        warm_up.compile_kernels(target(pool), "cuda")
    assert {name for name in costs.kernels if "qspec" in name} == {
        "sglang_qspec::gumbel_argmax",
        "sglang_qspec::gumbel_argmax_kept",
    }
    (given,) = verified
    assert all(value.is_cuda for value in given.values() if isinstance(value, torch.Tensor))
    assert pool.moved == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert waited
    assert "The kernels of passes with drafts were ready in" in caplog.text


def test_a_cpu_compiles_nothing() -> None:
    pool = Pool()
    warm_up.compile_kernels(target(pool), "cpu")
    assert not pool.moved


def test_the_kernels_take_what_they_are_called_with() -> None:
    """SGLang's kernel for a CPU checks types and shapes as the one for a GPU does."""
    warm_up._sample(300, "cpu")
    warm_up._accept("cpu")
