"""Dense matrix products through oneDNN with weights packed once.

In `torch.nn.functional.linear` oneDNN reorders the weights at each call. For the few rows of a
decode pass the reordering takes as long as the product, so this module packs the weights once.
(135M parameters in bfloat16, one row, one AVX-512 core: 36 ms unpacked, 22 ms packed.) The sums are
the same except for their order.
"""

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this processor."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.dim() != 2:
        return False
    if not torch.backends.mkldnn.is_available() or weight.numel() == 0:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Tensor:
    """Copy `weight` [out, in] to oneDNN's layout: an opaque tensor of the same shape."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach().contiguous(), None)


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `rows` [..., in] by a packed weight [out, in] and add `bias` [out]: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")


def packed_linear_add(rows: Tensor, packed: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
    """`packed_linear` plus `addend` [..., out], in one call."""
    return torch.ops.mkldnn._linear_pointwise.binary(rows, addend, packed, bias, "add")
