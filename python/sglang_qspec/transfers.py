"""Copies the small arrays of a pass to the device, and the outcome of the pass to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 8
"""Alignment of each array in the transfer, in bytes: the size of the largest element type."""


def to_device(device: torch.device | str, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return the arrays as tensors on `device`, which share one block of memory there.

    The transfer is one asynchronous copy from pinned memory. On a CPU the tensors share the memory
    of the arrays.
    """
    if torch.device(device).type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.nbytes + -array.nbytes % _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    block = _upload(torch.from_numpy(packed), device)
    return [
        block[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def host_waits(device: torch.device | str) -> bool:
    """Whether the host waits for each operation on the device, so that it can time passes."""
    return torch.device(device).type == "cpu"


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done the work that is queued now."""
    if host_waits(device):
        return lambda: None
    wait: Callable[[], None] = _event(device).synchronize
    return wait


class HostCopy:
    """A copy of a tensor on its way to the host.

    On a GPU the transfer is asynchronous and goes to pinned memory, and `read` waits for it. On a
    CPU the copy shares the memory of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._done: Any = None
        if tensor.device.type != "cpu":
            self._host = _download(tensor)
            self._done = _event(tensor.device)

    def read(self) -> NDArray[Any]:
        """Wait until the copy is complete, and return the values."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy()


def _download(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _event(device: torch.device) -> Any:
    """An event that occurs after all work that is queued on the device's current stream."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def _upload(packed: Tensor, device: torch.device | str) -> Tensor:
    return packed.pin_memory().to(device, non_blocking=True)
