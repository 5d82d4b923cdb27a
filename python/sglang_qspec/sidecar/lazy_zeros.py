"""Zeros in the memory of a CPU that take neither memory nor time until they are written.

`torch.zeros` writes all of its memory at once. The KV of a sidecar has gigabytes, so that delays
each start by seconds, beside a server that starts too, and takes memory that may never be used. The
system hands out zeros anyway, page by page, when a page is first used.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LEAST_BYTES = 1 << 20
"""Size from which a tensor is worth a mapping of its own, in bytes."""
_SPECIAL = ("out", "pin_memory", "requires_grad", "layout")
"""Arguments of `torch.zeros` that ask for more than memory."""


class LazyZeros(TorchFunctionMode):
    """Within this context, `torch.zeros` of `LEAST_BYTES` on a CPU maps memory and writes none.

    The tensors begin at a page. Their memory is freed with the last tensor that shares it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.zeros and _is_plain(given):
            # A tensor without memory says what the arguments mean, which have several forms.
            form = torch.zeros(*args, **{**given, "device": "meta"})
            if form.nbytes >= LEAST_BYTES:
                return _mapped(form)
        return func(*args, **given)


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether `torch.zeros` with these arguments makes a plain tensor on a CPU."""
    device = torch.device(given.get("device") or torch.get_default_device())
    return device.type == "cpu" and not any(name in given for name in _SPECIAL)


def _mapped(form: Tensor) -> Tensor:
    """Zeros with the shape and dtype of `form`."""
    memory = mmap.mmap(-1, form.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(form.dtype).view(form.shape)
