"""Quantization methods for CPUs without SGLang's own kernels.

Without them SGLang 0.5.23 cannot run integer weights on a CPU. `register()` adds two methods to
SGLang's loader and replaces three:

- `qspec_int8` and `qspec_int4` round an unquantized checkpoint while it loads.
- `gptq` and `auto-round` (4 and 8 bits) and `awq` (4 bits) load the same checkpoints as on a GPU.

With each method an unquantized LM head multiplies with an int8 copy of its weight, also if the
weight is tied to the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_quantization_method_choices
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
from sglang.srt.layers.quantization.awq import AWQCPUConfig
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.gptq import CPUGPTQConfig, GPTQLinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import get_linear_quant_method
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch.nn import Module

from sglang_qspec.engine.cpu.quantized_layers import AwqScheme, GptqScheme, LmHead, OnlineLinear
from sglang_qspec.errors import DraftModelError

_ACT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class OnlineConfig(QuantizationConfig):
    """Rounds the linear layers of an unquantized checkpoint while they load."""

    bits: int

    def get_name(self) -> str:
        return f"qspec_int{self.bits}"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return _ACT_DTYPES

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OnlineConfig:
        method = config.get("quant_method", "unknown")
        raise DraftModelError(
            f"quantization is qspec_int{cls.bits}, which rounds unquantized checkpoints, but this "
            f"checkpoint is quantized already ({method}); leave the setting out"
        )

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return OnlineLinear(self.bits)
        return _other(layer, prefix)

    def get_scaled_act_names(self) -> list[str]:
        return []


class Int8Config(OnlineConfig):
    """`qspec_int8`: one scale per output channel."""

    bits = 8


class Int4Config(OnlineConfig):
    """`qspec_int4`: a scale and a zero per group of 64 or 32 inputs; the LM head is int8."""

    bits = 4


class GptqConfig(CPUGPTQConfig):
    """`gptq`: GPTQ layout with 4 or 8 bits and any group size."""

    def __init__(self, weight_bits: int, *settings: Any, **more: Any) -> None:
        _check_bits("GPTQ", weight_bits, (4, 8))
        super().__init__(weight_bits, *settings, **more)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # type: ignore[override, unused-ignore]
        return _ACT_DTYPES

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, VocabParallelEmbedding) and not (
            isinstance(layer, ParallelLMHead) and self.lm_head_quantized
        ):
            return LmHead()
        method = get_linear_quant_method(self, layer, prefix, linear_method_cls=GPTQLinearMethod)
        return method or _other(layer, prefix)

    def get_linear_scheme(self, layer: Module) -> GptqScheme:
        return GptqScheme(self)


class AwqConfig(AWQCPUConfig):
    """`awq`: AWQ layout with 4 bits and any group size."""

    def __init__(self, weight_bits: int, *settings: Any, **more: Any) -> None:
        _check_bits("AWQ", weight_bits, (4,))
        super().__init__(weight_bits, *settings, **more)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return _ACT_DTYPES

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            method: QuantizeMethodBase = super().get_quant_method(layer, prefix)
            return method
        return _other(layer, prefix)

    def get_linear_scheme(self, layer: Module) -> AwqScheme:
        return AwqScheme(self)


class AutoRoundCpuConfig(AutoRoundConfig):
    """`auto-round`: GPTQ or AWQ layout, with numbers of bits that may differ by layer."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # type: ignore[override, unused-ignore]
        return _ACT_DTYPES

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return _other(layer, prefix)
        bits, group_size, sym = self.get_layer_config(layer, prefix)
        if not self.check_quantized(bits):
            return UnquantizedLinearMethod()
        config: GptqConfig | AwqConfig
        if "awq" in self.packing_format or "awq" in self.backend:
            config = AwqConfig(bits, group_size, not sym)
        else:
            config = GptqConfig(**self.get_gptq_config_kwargs(bits, group_size))
        return config.get_quant_method(layer, prefix)


def _other(layer: Module, prefix: str) -> QuantizeMethodBase | None:
    """Return the method of a layer that is not linear, or None for SGLang's default."""
    if isinstance(layer, FusedMoE):
        raise DraftModelError(
            f"{prefix} is a mixture of experts, which the CPU backend cannot run with integer "
            "weights; use a dense draft model"
        )
    return LmHead() if isinstance(layer, VocabParallelEmbedding) else None


def _check_bits(layout: str, bits: int, allowed: tuple[int, ...]) -> None:
    if bits not in allowed:
        raise DraftModelError(
            f"the checkpoint has {bits}-bit weights in {layout} layout, but the CPU backend loads "
            f"{' or '.join(map(str, allowed))} bits"
        )


_METHODS: dict[str, type[QuantizationConfig]] = {
    "qspec_int8": Int8Config,
    "qspec_int4": Int4Config,
    "gptq": GptqConfig,
    "awq": AwqConfig,
    "auto-round": AutoRoundCpuConfig,
}


def register() -> None:
    """Add the methods to SGLang's table; repeated calls have no further effect."""
    if QUANTIZATION_METHODS.get("qspec_int8") is Int8Config:
        return
    QUANTIZATION_METHODS.update(_METHODS)
    add_quantization_method_choices(["qspec_int8", "qspec_int4"])
