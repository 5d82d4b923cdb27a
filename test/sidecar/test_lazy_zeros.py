"""Zeros that take no memory until they are written."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch

from sglang_qspec.sidecar.lazy_zeros import LEAST_BYTES, LazyZeros

BYTES = 1 << 28


def resident() -> int:
    """Memory of this process, in bytes."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_only_what_is_written_takes_memory() -> None:
    before = resident()
    with LazyZeros():
        zeros = torch.zeros(BYTES, dtype=torch.uint8, device="cpu")
    assert resident() - before < BYTES / 4
    zeros[: BYTES // 2] = 1
    assert BYTES / 4 < resident() - before < 3 * BYTES / 4
    view = zeros[BYTES // 2 :]
    del zeros
    assert not view.any(), "the memory outlives the first tensor"
    del view
    assert resident() - before < BYTES / 4, "the memory is freed"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (((2, 3, 1 << 18),), {"dtype": torch.bfloat16}),
        ((2, 3, 1 << 18), {}),
        ((), {"size": (1 << 20,), "dtype": torch.float32}),
    ],
)
def test_the_tensor_is_the_one_that_torch_makes(args: Any, kwargs: Any) -> None:
    with LazyZeros():
        lazy = torch.zeros(*args, **kwargs)
    plain = torch.zeros(*args, **kwargs)
    assert lazy.dtype is plain.dtype
    assert lazy.stride() == plain.stride()
    assert torch.equal(lazy, plain)
    assert lazy.data_ptr() % 4096 == 0
    assert lazy.add_(1).eq(1).all()


def test_other_tensors_are_left_to_torch() -> None:
    small = torch.ones(4)
    with LazyZeros():
        torch.zeros(4, out=small)
        trained = torch.zeros(LEAST_BYTES, requires_grad=True)
        elsewhere = torch.zeros(LEAST_BYTES, device="meta")
        with torch.device("meta"):
            there = torch.zeros(LEAST_BYTES)
    assert not small.any()
    assert trained.requires_grad
    assert elsewhere.is_meta
    assert there.is_meta
