"""Copies the small arrays of a pass to the device of the pass, in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 8
"""Bytes of the largest element type, to which each array is aligned in the transfer."""


def stage(device: torch.device | str, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return the arrays as tensors on `device`, which share one block of memory there.

    The transfer is one asynchronous copy from pinned memory. On a CPU the tensors share the memory
    of the arrays.
    """
    if torch.device(device).type == "cpu":
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


def _upload(packed: Tensor, device: torch.device | str) -> Tensor:
    return packed.pin_memory().to(device, non_blocking=True)
