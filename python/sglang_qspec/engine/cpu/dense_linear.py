"""Run SGLang's unquantized linear layers and LM head on packed weights (`cpu.dense_linear`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch.nn import Parameter

from sglang_qspec.cpu.dense_linear import can_pack, pack, packed_linear

if TYPE_CHECKING:
    from torch import Tensor

_stock_finish = UnquantizedLinearMethod.process_weights_after_loading
_stock_apply = UnquantizedLinearMethod.apply
_stock_lm_head = LogitsProcessor._compute_lm_head


def _finish(method: UnquantizedLinearMethod, layer: Any) -> None:
    """Replace the loaded weight by its packed form; it can't be loaded into again."""
    _stock_finish(method, layer)
    if can_pack(layer.weight):
        layer.weight = Parameter(pack(layer.weight.data), requires_grad=False)


def _apply(
    method: UnquantizedLinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    if layer.weight.is_mkldnn:
        return packed_linear(x, layer.weight, bias)
    return _stock_apply(method, layer, x, bias)


def _lm_head(
    processor: LogitsProcessor,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The LM head keeps its dense weight too: it may be tied to the embedding table."""
    plain = (
        type(getattr(lm_head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and not hasattr(lm_head, "set_lora")
        and not processor.use_fp32_lm_head
        and processor.rl_on_policy_target is None
    )
    if not plain or not can_pack(lm_head.weight):
        return _stock_lm_head(processor, hidden_states, lm_head, embedding_bias, **options)
    weight = lm_head.weight
    kept = getattr(lm_head, "_qspec_packed", None)
    state = (weight.data_ptr(), weight._version)
    if kept is None or kept[0] != state:
        kept = lm_head._qspec_packed = (state, pack(weight.data))
    return packed_linear(hidden_states.to(weight.dtype), kept[1])


def install() -> None:
    """Patch the classes; may be called again."""
    UnquantizedLinearMethod.process_weights_after_loading = _finish
    UnquantizedLinearMethod.apply = _apply
    LogitsProcessor._compute_lm_head = _lm_head
