"""Runs SGLang's unquantized linear layers and LM head by `cpu.dense_linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch.nn import Parameter

from sglang_qspec.cpu.dense_linear import (
    can_pack,
    pack,
    packed_linear,
    takes_unpacked,
    unpacked_linear,
)

if TYPE_CHECKING:
    from torch import Tensor

_stock_finish = UnquantizedLinearMethod.process_weights_after_loading
_stock_apply = UnquantizedLinearMethod.apply
_stock_lm_head = LogitsProcessor._compute_lm_head
_stock_postprocess = DefaultModelLoader.postprocess_weights

WRAPPER = "_qspec_lora_wrapper"
"""Attribute of a layer that holds SGLang's LoRA wrapper around it, which has the same weight."""

_load_count = 0


def load_count() -> int:
    """Return the number of weight loads in this process; copies from an earlier load are stale.

    Loading writes through `Parameter.data`, which changes neither the address nor the version of a
    tensor. So only this number shows that a weight has changed.
    """
    return _load_count


def _postprocess(model: Any, target_device: Any) -> None:
    """Count a load: SGLang calls this after the first load and after each weight update."""
    global _load_count
    _stock_postprocess(model, target_device)
    _load_count += 1


def _finish(method: UnquantizedLinearMethod, layer: Any) -> None:
    """Replace the loaded weight by its packed form, with the attributes that its loader needs."""
    _stock_finish(method, layer)
    if can_pack(layer.weight):
        _replace(layer, pack(layer.weight.data))


def _restore(method: UnquantizedLinearMethod, layer: Any) -> None:
    """Unpack the weight before a new load, because a packed weight cannot be written to."""
    if layer.weight.is_mkldnn:
        _replace(layer, layer.weight.data.to_dense())


def _replace(layer: Any, data: Tensor) -> None:
    """Give the layer, and its LoRA wrapper if it has one, a weight with new data.

    The new parameter has the attributes that SGLang's loader reads.
    """
    parameter = Parameter(data, requires_grad=False)
    vars(parameter).update(vars(layer.weight))
    layer.weight = parameter
    wrapper = vars(layer).get(WRAPPER)
    if wrapper is not None:
        wrapper.weight = parameter


def _apply(
    method: UnquantizedLinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    if layer.weight.is_mkldnn:
        return packed_linear(x, layer.weight, bias)
    if x.dtype == layer.weight.dtype and takes_unpacked(layer.weight):
        return unpacked_linear(x, layer.weight, bias)
    return _stock_apply(method, layer, x, bias)


def _lm_head(
    processor: LogitsProcessor,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute logits by the weight as it is, or by a packed copy.

    A copy, because the embedding table may share the dense weight.
    """
    plain = (
        type(getattr(lm_head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and not hasattr(lm_head, "set_lora")
        and not processor.use_fp32_lm_head
        and processor.rl_on_policy_target is None
    )
    if plain and takes_unpacked(lm_head.weight):
        return unpacked_linear(hidden_states.to(lm_head.weight.dtype), lm_head.weight)
    if not plain or not can_pack(lm_head.weight):
        return _stock_lm_head(processor, hidden_states, lm_head, embedding_bias, **options)
    weight = lm_head.weight
    kept = getattr(lm_head, "_qspec_packed", None)
    state = (weight.data_ptr(), weight._version, load_count())
    if kept is None or kept[0] != state:
        kept = lm_head._qspec_packed = (state, pack(weight.data))
    return packed_linear(hidden_states.to(weight.dtype), kept[1])


def install() -> None:
    """Patch SGLang's classes; repeated calls have no further effect."""
    UnquantizedLinearMethod.process_weights_after_loading = _finish
    UnquantizedLinearMethod.restore_weights_before_loading = _restore
    UnquantizedLinearMethod.apply = _apply
    DefaultModelLoader.postprocess_weights = staticmethod(_postprocess)
    LogitsProcessor._compute_lm_head = _lm_head
