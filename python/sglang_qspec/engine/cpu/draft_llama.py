"""The compiled decoder of Llama draft models with int8 weights: one call for all layers.

With few tokens per pass, `engine.cpu.llama` spends most of the time on the dispatch of torch calls.
Without these calls, reading the weights takes most of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.models.llama import LlamaModel

from sglang_qspec.cpu.linear import Int8Linear
from sglang_qspec.cpu.native import drafts_only, native
from sglang_qspec.engine.cpu.attention import CpuAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor

    from sglang_qspec.cpu._native import NativeLayer

EXACT_ROWS = 8
"""Maximum number of tokens of a decode pass with exact activations; prefill always has them.

Rounding to 8 bits lowers the agreement with the target. Up to this number of tokens, reading the
weights bounds even a product of two digits. With AVX2 one digit is exact, so all passes are."""
HEAD_BLOCK = 64
"""The decoder requires head dimensions that are a multiple of this."""


class DraftDecoder:
    """The layers of one model over one KV pool; `of` creates it."""

    def __init__(self, model: LlamaModel, backend: CpuAttention, layers: list[NativeLayer]) -> None:
        attention = model.layers[0].self_attn
        self._backend = backend
        self._table = backend.req_to_token_pool.req_to_token.numpy()
        self._decoder = native().Decoder(
            layers,
            _float(model.norm.weight),
            _float(attention.rotary_emb.cos_sin_cache),
            attention.num_heads,
            attention.num_kv_heads,
            model.norm.variance_epsilon,
        )

    @classmethod
    def of(cls, model: LlamaModel, backend: Any) -> DraftDecoder | None:
        """Return the decoder of a model that `engine.cpu.llama` supports.

        Returns None if the process runs a target, or if the processor, the KV pool, the attention
        backend or a layer is not supported.
        """
        if not drafts_only() or native() is None or type(backend) is not CpuAttention:
            return None
        pool = backend.plain_pool
        if pool is None or pool.dtype not in (torch.bfloat16, torch.float32):
            return None
        layers = [_read(layer, backend, pool) for layer in model.layers]
        known = [layer for layer in layers if layer is not None]
        return cls(model, backend, known) if len(known) == len(layers) else None

    def takes(self, forward_batch: ForwardBatch) -> bool:
        """Whether the pass is a plain decode or an extend; the decoder cannot verify trees."""
        mode = forward_batch.forward_mode
        return bool(mode.is_decode() or (mode.is_extend() and not mode.is_target_verify()))

    def forward(self, hidden: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Map embeddings [tokens, hidden] to the final hidden states, float32 [tokens, hidden]."""
        rows = forward_batch.req_pool_indices.long()
        exact = hidden.shape[0] <= EXACT_ROWS
        if not forward_batch.forward_mode.is_decode():
            exact = True
            rows = rows.repeat_interleave(forward_batch.extend_seq_lens.long())
        out = hidden.to(torch.float32, copy=True)
        self._decoder.forward(
            out.numpy(),
            positions.long().numpy(),
            forward_batch.out_cache_loc.long().numpy(),
            rows.numpy(),
            self._table,
            native().EXACT_DIGITS if exact else 1,
            torch.get_num_threads(),
        )
        return out


def _read(layer: Any, backend: CpuAttention, pool: Any) -> NativeLayer | None:
    attention, mlp = layer.self_attn, layer.mlp
    core = attention.attn
    weights = [
        _packed(linear)
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    ]
    if (
        None in weights
        or attention.head_dim % HEAD_BLOCK
        or core.scaling != attention.head_dim**-0.5
        or core.logit_cap > 0
        or core.sliding_window_size > -1
        or not backend.is_plain(core)
    ):
        return None
    place = core.layer_id - pool.start_layer
    return (
        *weights,
        _float(layer.input_layernorm.weight),
        _float(layer.post_attention_layernorm.weight),
        _bits(pool.k_buffer[place]),
        _bits(pool.v_buffer[place]),
    )


def _packed(linear: LinearBase) -> Any:
    """Return the layer's compiled int8 weight; None if it has none or has a bias."""
    packed = getattr(linear, "packed", None)
    if not isinstance(packed, Int8Linear) or linear.bias is not None:
        return None
    return packed.native


def _float(weight: Tensor) -> Any:
    return weight.detach().float().contiguous().numpy()


def _bits(buffer: Tensor) -> Any:
    return (buffer.view(torch.uint16) if buffer.dtype == torch.bfloat16 else buffer).numpy()
