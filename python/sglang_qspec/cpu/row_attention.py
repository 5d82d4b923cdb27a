"""Attention of a pass over few rows, compiled: one call per layer.

`pass_plan` takes a dozen torch calls per layer, copies the keys and values that it reads, and pads
requests to one length. It is faster only if requests share a long prefix, which it reads once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_qspec.cpu.attention import Heads
from sglang_qspec.cpu.native import native
from sglang_qspec.cpu.row_ops import can_run

DIM_STEP = 64
"""The head dimension must be a multiple of this."""


class RowAttention:
    """The attention of all new tokens of a pass, in layers with the same heads."""

    def __init__(
        self,
        slots: Tensor,
        kv_lens: Tensor,
        new_lens: Sequence[int],
        heads: Heads,
        dim: int,
        scale: float,
        visible: Tensor | None,
    ) -> None:
        """Arguments are as in `pass_plan.plan_pass`; `dim` is the size of a head."""
        if visible is None:
            visible = torch.ones(len(new_lens), 1, 1, dtype=torch.bool)
        self._native = native().RowAttention(
            slots.int().contiguous().numpy(),
            kv_lens.long().contiguous().numpy(),
            torch.tensor(new_lens, dtype=torch.int64).numpy(),
            visible.contiguous().numpy(),
            heads.keys * heads.group,
            heads.keys,
            dim,
            scale,
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute one layer; arguments are as in `pass_plan.attend_pass`.

        Returns [tokens, heads, dim].
        """
        out = query.new_empty(query.shape)
        self._native.attend(
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            keys.shape[0],
            out.data_ptr(),
            query.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return out


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `RowAttention` supports a layer; arguments are as in `pass_plan.attend_pass`."""
    dim = query.shape[2]
    return (
        can_run(query)
        and keys.dtype == values.dtype == query.dtype
        and keys.shape == values.shape
        and keys.is_contiguous()
        and values.is_contiguous()
        and dim % DIM_STEP == 0
        and query.stride(1) == dim
        and query.stride(2) == 1
    )
