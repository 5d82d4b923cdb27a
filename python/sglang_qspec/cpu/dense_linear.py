"""Dense matrix products for the few rows of a decode pass: compiled here, or through oneDNN.

In `torch.nn.functional.linear` oneDNN reorders the weights at each call. For few rows the
reordering takes as long as the product. (135M parameters in bfloat16, one row, one AVX-512 core: 36
ms, and 22 ms with weights that are packed once.) So this module packs the weights once. The sums
are the same except for their order.

The compiled products (`cpu/native/dense.h`) read weights as they are, without packing. With AMX
those of bfloat16 are faster than oneDNN for few rows, and slower from 64 rows on. oneDNN does not
multiply bfloat16 without AVX-512, and torch's own product takes nearly as long for each row as for
the first one. With AVX2 those of float32 are faster for few rows, too ("Decode passes and the
memory" in docs/results.md). The sums are in the same order for any number of rows.
"""

import torch
from torch import Tensor

from sglang_qspec.cpu.native import native

OUTPUT_STEP, INPUT_STEP = 16, 32
"""`unpacked_linear` needs a multiple of the first in outputs, and of the second in inputs."""


MOST_FLOAT_ROWS = 64
"""Maximum number of rows for the compiled product of float32; torch multiplies more rows."""


def takes_unpacked(weight: Tensor) -> bool:
    """Whether `unpacked_linear` multiplies by this weight."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[0] % OUTPUT_STEP == weight.shape[1] % INPUT_STEP == 0
        and native() is not None
        and _is_faster(weight.dtype)
    )


def _is_faster(dtype: torch.dtype) -> bool:
    """Whether the compiled product of few rows is faster than oneDNN's."""
    if dtype == torch.float32:
        return bool(native().TAKES_FLOAT32)
    return bool(native().may_use_tiles() or not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def unpacked_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """Multiply `rows` [..., in] by a `weight` [out, in] for which `takes_unpacked` is true.

    Adds `bias` [out] and `addend` [..., out], and rounds the sum once: [..., out]. All have one
    type.
    """
    outputs, inputs = weight.shape
    if weight.dtype == torch.float32 and rows.numel() > MOST_FLOAT_ROWS * inputs:
        product = torch.nn.functional.linear(rows, weight, bias)
        return product if addend is None else product.add_(addend)
    out = rows.new_empty((*rows.shape[:-1], outputs))
    # These tensors must live until the end of the call.
    rows = rows.contiguous()
    added = [None if part is None else part.contiguous() for part in (bias, addend)]
    native().multiply_dense(
        rows.data_ptr(),
        weight.data_ptr(),
        *(0 if part is None else part.data_ptr() for part in added),
        out.data_ptr(),
        rows.numel() // inputs,
        inputs,
        outputs,
        weight.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this processor, and no product reads it as it is."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.dim() != 2:
        return False
    if not torch.backends.mkldnn.is_available() or weight.numel() == 0 or takes_unpacked(weight):
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
