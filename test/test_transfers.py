"""Arrays reach a device in one transfer and keep their values and types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_qspec import transfers
from sglang_qspec.transfers import to_device
from test.verify.fake_cuda import CUDA, fake_cuda

ARRAYS = (
    np.arange(6, dtype=np.int32).reshape(2, 3).T,
    np.array([True, False, True]),
    np.zeros((2, 0), np.int64),
    np.array([[2**60], [-5]]),
    np.array([0.5, -1.5], np.float32),
)


def test_on_a_cpu_tensors_share_the_memory_of_the_arrays() -> None:
    array = np.zeros(3)
    (tensor,) = to_device("cpu", array)
    array[1] = 4.0
    assert tensor.tolist() == [0.0, 4.0, 0.0]


def test_the_packed_arrays_keep_values_types_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packing of other devices, whose memory is the host's here."""
    monkeypatch.setattr(transfers, "_upload", lambda packed, _device: packed)
    for array, tensor in zip(ARRAYS, to_device("cuda", *ARRAYS), strict=True):
        expected = torch.from_numpy(array)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_the_arrays_on_a_device_keep_values_types_and_shapes(device: torch.device) -> None:
    for array, tensor in zip(ARRAYS, to_device(device, *ARRAYS), strict=True):
        assert tensor.device.type == device.type
        expected = torch.from_numpy(array)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)


def test_all_arrays_take_one_transfer() -> None:
    with fake_cuda() as costs:
        tensors = to_device("cuda", *ARRAYS)
        assert {tensor.device for tensor in tensors} == {CUDA}
    assert len(costs.uploads) == 1
    assert costs.pinned == 1
    assert not costs.synchronisations
