"""SGLang's interface to `cpu.linear`: creates a layer's parameters, packs them, and multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.quantization.awq.schemes import AWQLinearScheme
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.gptq.schemes import GPTQLinearScheme
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from sglang_qspec.cpu.linear import Int4Linear, Int8Linear
from sglang_qspec.cpu.linear_grids import Grid
from sglang_qspec.cpu.linear_layouts import in_order, read_awq, read_gptq
from sglang_qspec.engine.cpu.dense_linear import load_count
from sglang_qspec.errors import DraftModelError

if TYPE_CHECKING:
    from torch import Tensor

_GROUP_SIZES = (64, 32)
"""Group sizes of int4 weights that are rounded while loading. A layer uses the first group size
that divides its number of inputs, and int8 if none does."""


class OnlineLinear(LinearMethodBase):
    """Loads a layer unquantized, rounds it to int8 or int4, and keeps only the packed weight."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        UnquantizedLinearMethod.create_weights(self, layer, *sizes, **attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        group = next((size for size in _GROUP_SIZES if weight.shape[1] % size == 0), None)
        if self._bits == 4 and group is not None:
            layer.packed = Int4Linear.quantize(weight, group)
        else:
            layer.packed = Int8Linear.quantize(weight)
        del layer.weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = layer.packed(x, bias)
        return product


class LmHead(UnquantizedEmbeddingMethod):
    """An unquantized embedding table. As an LM head it multiplies with an int8 copy of its weight.

    The first product makes the copy, because a table does not know whether it is tied to a head.
    """

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight
        state = (weight.data_ptr(), weight._version, load_count())
        if getattr(layer, "packed_state", None) != state:
            layer.packed = Int8Linear.quantize(weight.data)
            layer.packed_state = state
        product: Tensor = layer.packed(x, bias)
        return product


class GptqScheme(GPTQLinearScheme):
    """Parameters as SGLang loads GPTQ checkpoints, then `PackedKernel`."""

    def _init_kernel(self, quant_config: Any) -> PackedKernel:
        return PackedKernel(quant_config)

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        _check_group(self.quant_config.group_size, sizes["input_size_per_partition"])
        # `params_dtype` is the type of the scales only; checkpoints store them in float16.
        super().create_weights(layer, **{**sizes, "params_dtype": torch.float32})


class AwqScheme(AWQLinearScheme):
    """Parameters as SGLang loads AWQ checkpoints, then `PackedKernel`."""

    def _init_kernel(self, quant_config: Any) -> PackedKernel:
        return PackedKernel(quant_config)

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        if self.quant_config.group_size == -1:
            if sizes["input_size_per_partition"] != sizes["input_size"]:
                raise DraftModelError(
                    "an AWQ checkpoint with group_size -1 cannot be split over "
                    "tensor-parallel ranks"
                )
            self.quant_config.group_size = sizes["input_size"]
        _check_group(self.quant_config.group_size, sizes["input_size_per_partition"])
        super().create_weights(layer, **{**sizes, "params_dtype": torch.float32})


class PackedKernel:
    """Packs a loaded layer, drops its parameters, and multiplies.

    With few rows it uses 4-bit weights exactly (`cpu.linear`). 8-bit weights are exact with one
    scale per channel; in groups they are rounded again to one scale per channel.
    """

    def __init__(self, quant_config: Any) -> None:
        self._config = quant_config

    def process_weights_after_loading(self, layer: Any) -> None:
        bits = self._config.weight_bits
        layer.packed = (Int4Linear if bits == 4 else Int8Linear)(self._read(layer))
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            if hasattr(layer, name):
                delattr(layer, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = layer.packed(x, bias)
        return product

    def _read(self, layer: Any) -> Grid:
        tensors = (layer.qweight.data, layer.qzeros.data, layer.scales.data)
        if not hasattr(layer, "g_idx"):
            return read_awq(*tensors)
        if not in_order(layer.g_idx.data, layer.scales.shape[0]):
            raise DraftModelError(
                "the checkpoint's g_idx permutes inputs (desc_act, act-order), "
                "which the CPU backend cannot load; quantize with desc_act=False"
            )
        return read_gptq(
            *tensors,
            bits=self._config.weight_bits,
            zeros_off_by_one=self._config.checkpoint_format != "gptq_v2",
        )


def _check_group(group_size: int, inputs: int) -> None:
    if group_size != -1 and (group_size < 1 or inputs % group_size):
        raise DraftModelError(
            f"group_size is {group_size}, but must be -1 or divide the layer's {inputs} inputs"
        )
