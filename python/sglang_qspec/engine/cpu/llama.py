"""The decoder of Llama models on the CPU, with few torch calls per layer.

With few tokens per pass, the dispatch of torch calls takes as long as the matrix products. With one
rank and plain layers most of SGLang's calls are not needed. So `install` replaces
`LlamaModel.forward` by a loop over the same weights, attention backend and KV cache. Other cases
(several ranks, LoRA, embeddings as input, subclasses with other layers) use SGLang's forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from sglang.srt.runtime_context import get_parallel

from sglang_qspec.cpu.decoder_ops import Rotation, mirrored, rms_norm, silu_and_mul
from sglang_qspec.cpu.dense_linear import (
    packed_linear,
    packed_linear_add,
    takes_unpacked,
    unpacked_linear,
)
from sglang_qspec.engine.cpu.attention import CpuAttention
from sglang_qspec.engine.cpu.dense_linear import load_count
from sglang_qspec.engine.cpu.draft_llama import DraftDecoder

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor

_stock_forward = LlamaModel.forward


class _Product:
    """One linear layer of any quantization method."""

    def __init__(self, linear: LinearBase) -> None:
        self._linear = linear
        self._bias = linear.bias
        weight = getattr(linear, "weight", None)
        self._packed = weight if weight is not None and weight.is_mkldnn else None
        self._unpacked = weight if weight is not None and takes_unpacked(weight) else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._unpacked is not None:
            return unpacked_linear(rows, self._unpacked, self._bias)
        if self._packed is not None:
            return packed_linear(rows, self._packed, self._bias)
        return self._linear.quant_method.apply(self._linear, rows, self._bias)

    def plus(self, rows: Tensor, addend: Tensor) -> Tensor:
        if self._unpacked is not None:
            return unpacked_linear(rows, self._unpacked, self._bias, addend)
        if self._packed is not None:
            return packed_linear_add(rows, self._packed, self._bias, addend)
        return addend + self._linear.quant_method.apply(self._linear, rows, self._bias)


class _Norm:
    def __init__(self, norm: RMSNorm) -> None:
        self._weight = mirrored(norm.weight.data)
        self._eps = norm.variance_epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self._weight, self._eps)


class _Layer:
    def __init__(self, layer: LlamaDecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = _Norm(layer.input_layernorm)
        self.post_norm = _Norm(layer.post_attention_layernorm)
        self.qkv, self.out = _Product(attention.qkv_proj), _Product(attention.o_proj)
        self.gate_up, self.down = _Product(mlp.gate_up_proj), _Product(mlp.down_proj)
        self.attention = attention.attn


@dataclass(frozen=True)
class _Decoder:
    """The layers of one model. After each load of weights the model gets a new decoder."""

    layers: list[_Layer]
    norm: _Norm
    rotary: RotaryEmbedding
    heads: int
    kv_heads: int
    head_dim: int
    drafting: DraftDecoder | None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        captured: Collection[int] = (),
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the output of the last norm.

        If `captured` names layers, also return the inputs of these layers.
        """
        if not captured and self.drafting is not None and self.drafting.takes(forward_batch):
            return self.drafting.forward(hidden, positions, forward_batch)
        backend = get_attn_backend()
        direct = type(backend) is CpuAttention and backend.is_plain(self.layers[0].attention)
        turned = self.heads + self.kv_heads
        angles = self.rotary.cos_sin_cache.index_select(0, positions.flatten())
        rotate = Rotation(angles, hidden.dtype)
        inputs = []
        for number, layer in enumerate(self.layers):
            if number in captured:
                inputs.append(hidden)
            qkv = layer.qkv(layer.input_norm(hidden))
            qkv = qkv.view(-1, turned + self.kv_heads, self.head_dim)
            rotated = rotate(qkv[:, :turned])
            query, key, value = rotated[:, : self.heads], rotated[:, self.heads :], qkv[:, turned:]
            if direct:
                mixed = backend.store_and_attend(query, key, value, layer.attention, forward_batch)
                mixed = mixed.flatten(1)
            else:
                mixed = layer.attention(query.flatten(1), key.flatten(1), value, forward_batch)
            hidden = layer.out.plus(mixed, hidden)
            gate_up = layer.gate_up(layer.post_norm(hidden))
            hidden = layer.down.plus(silu_and_mul(gate_up), hidden)
        output = self.norm(hidden).contiguous()
        return (output, inputs) if captured else output


def _read(model: LlamaModel) -> _Decoder | None:
    """Return the decoder of a model, or None if `_Decoder` cannot compute some part of it."""
    parallel = get_parallel()
    if parallel.tp_size != 1 or parallel.pp_size != 1 or parallel.attn_dp_size != 1:
        return None
    layers = list(model.layers)
    if not all(map(_is_plain_layer, layers)) or not _is_plain_norm(model.norm):
        return None
    attention = layers[0].self_attn
    if any(layer.self_attn.rotary_emb is not attention.rotary_emb for layer in layers):
        return None
    return _Decoder(
        [_Layer(layer) for layer in layers],
        _Norm(model.norm),
        attention.rotary_emb,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        DraftDecoder.of(model, get_attn_backend()),
    )


def _is_plain_layer(layer: Any) -> bool:
    if type(layer) is not LlamaDecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not LlamaAttention or type(mlp) is not LlamaMLP:
        return False
    rotary = attention.rotary_emb
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return (
        type(rotary).forward_native is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == attention.head_dim
        and type(mlp.act_fn) is SiluAndMul
        and all(isinstance(linear, LinearBase) for linear in linears)
        and _is_plain_norm(layer.input_layernorm)
        and _is_plain_norm(layer.post_attention_layernorm)
    )


def _is_plain_norm(norm: Any) -> bool:
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )


def _forward(
    model: LlamaModel,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: ForwardBatch,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    plain = input_embeds is None and pp_proxy_tensors is None
    if plain and positions.dim() == 1 and not forward_batch.forward_mode.is_idle():
        kept = model.__dict__.get("_qspec_decoder")
        if kept is None or kept[0] != load_count():
            kept = model.__dict__["_qspec_decoder"] = (load_count(), _read(model))
        decoder = kept[1]
        if decoder is not None:
            embeds = model.embed_tokens(input_ids)
            return decoder.forward(embeds, positions, forward_batch, model.layers_to_capture)
    return _stock_forward(
        model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
    )


def install() -> None:
    """Patch SGLang's class; repeated calls have no further effect."""
    LlamaModel.forward = _forward
