"""The attention backend `qspec_cpu`: SGLang's interface to `sglang_qspec.cpu.pass_plan`.

It computes causal self-attention, with sliding windows, logit caps, attention sinks, and the
absorbed form of multi-head latent attention. Other layers (cross attention, encoders) use the
inherited torch_native code, which cannot verify trees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_qspec.cpu.attention import BlockPlan, Heads, attend_block
from sglang_qspec.cpu.pass_plan import PassPlan, attend_pass, may_share, plan_pass
from sglang_qspec.cpu.row_attention import RowAttention, can_attend
from sglang_qspec.cpu.row_ops import can_run, store_rows

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

NAME = "qspec_cpu"
_SHORT_EXTEND = 32
"""Maximum number of new tokens per request for which an extend runs as one padded batch."""


class CpuAttention(TorchNativeAttnBackend):
    """Attention of decode, extend and TARGET_VERIFY on the CPU, planned once per forward pass."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._batch: _Batch | None = None
        self._windowed: _Batch | None = None
        """The pass in layers that SGLang keeps in a pool of the windows alone."""
        if model_runner.use_mla_backend:
            _absorb()
        pool = self.token_to_kv_pool
        plain = (
            type(pool) is MHATokenToKVPool
            and pool.store_dtype == pool.dtype
            and not pool.is_quantized_kv_cache
            and not pool.use_hnd
        )
        self.plain_pool: MHATokenToKVPool | None = pool if plain else None
        """The KV pool if its buffers are plain [slots, kv_heads, dim] tensors, otherwise None."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch = self._windowed = None
        if not forward_batch.forward_mode.is_idle():
            self._batch = _Batch(forward_batch, self.req_to_token_pool.req_to_token)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not self.is_plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not self.is_plain(layer):
            if forward_batch.forward_mode.is_target_verify():
                raise NotImplementedError(
                    f"attention backend {NAME} cannot verify draft trees in layer "
                    f"{layer.layer_id}: only plain causal self-attention is supported"
                )
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def is_plain(self, layer: RadixAttention) -> bool:
        """Whether `sglang_qspec.cpu` can compute the layer."""
        return not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save_kv_cache and k is not None and v is not None:
            output = self.store_and_attend(query, k, v, layer, forward_batch, sinks)
        else:
            output = self._read(query, layer, forward_batch, sinks)
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def store_and_attend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write `k` and `v` [tokens, kv_heads, dim] to the cache, then compute the attention.

        `query` and the result are [tokens, heads, dim]; `sinks` is as in `attend_rows`.
        """
        batch = self._batch_of(forward_batch)
        pool = self.token_to_kv_pool
        if self.plain_pool is not None and k.dtype == pool.dtype:
            place = layer.layer_id - pool.start_layer
            for rows, buffer in ((k, pool.k_buffer[place]), (v, pool.v_buffer[place])):
                if can_run(rows) and rows.stride(1) == rows.shape[2] and rows.stride(2) == 1:
                    store_rows(rows, batch.written, buffer)
                else:
                    buffer.index_copy_(0, batch.written, rows)
        else:
            locations = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, locations, k, v)
        return self._read(query, layer, forward_batch, sinks)

    def _read(
        self,
        query: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        sinks: Tensor | None,
    ) -> Tensor:
        pool = self.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        windowed = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        batch = self._batch_of(forward_batch, windowed=windowed)
        return batch.attend(query, keys, values, layer, sinks)

    def _batch_of(self, forward_batch: ForwardBatch, *, windowed: bool = False) -> _Batch:
        """The pass over the slots of the whole texts, or over those of SGLang's windowed pool."""
        if self._batch is None:
            self._batch = _Batch(forward_batch, self.req_to_token_pool.req_to_token)
        if not windowed:
            return self._batch
        if self._windowed is None:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._windowed = self._batch.over(translate)
        return self._windowed


class _Batch:
    """The requests of one forward pass, with a plan of their attention for each kind of layer."""

    def __init__(self, forward_batch: ForwardBatch, req_to_token: Tensor) -> None:
        mode = forward_batch.forward_mode
        kv_lens = forward_batch.seq_lens.long()
        bs = kv_lens.shape[0]
        visible: Tensor | None = None
        if mode.is_target_verify():
            new_lens, visible = _trees(forward_batch.spec_info, bs)
            kv_lens = kv_lens + torch.tensor(new_lens)
        elif mode.is_decode():
            new_lens = [1] * bs
        else:
            new_lens = _host_list(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens)
        rows = max(new_lens, default=0)
        self._decodes = mode.is_target_verify() or mode.is_decode()
        self._in_blocks = not self._decodes and rows > _SHORT_EXTEND
        """Whether each request's attention is computed alone, because its extend is long."""
        if not self._decodes and not self._in_blocks:
            visible = torch.ones(rows, rows, dtype=torch.bool).tril().expand(bs, rows, rows)
        self.written = forward_batch.out_cache_loc.long()
        self._kv_lens, self._new_lens, self._visible = kv_lens, new_lens, visible
        self._slots = req_to_token[forward_batch.req_pool_indices.long(), : int(kv_lens.max())]
        self._plans: dict[tuple[Any, ...], PassPlan] = {}
        self._blocks: dict[tuple[Any, ...], list[BlockPlan]] = {}
        self._rows: dict[tuple[Any, ...], RowAttention | None] = {}

    def over(self, translate: Callable[[Tensor], Tensor]) -> _Batch:
        """The same pass over other slots. A slot outside all windows may have no translation."""
        other = copy.copy(self)
        other._slots = translate(self._slots.long())
        other._plans, other._blocks, other._rows = {}, {}, {}
        return other

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: RadixAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        cap, scale = float(layer.logit_cap), layer.scaling
        heads = Heads(keys.shape[1], query.shape[1] // keys.shape[1])
        if self._in_blocks:
            plans = self._block_plans(heads, query.dtype, window)
            results = [
                attend_block(plan, part, keys, values, scale, cap, sinks)
                for plan, part in zip(plans, query.split(self._new_lens), strict=True)
            ]
            return results[0] if len(results) == 1 else torch.cat(results)
        if window is None and cap == 0.0 and sinks is None:
            compiled = self._row_attention(heads, query, keys, values, scale)
            if compiled is not None:
                return compiled.attend(query, keys, values)
        plan = self._plan(heads, query.dtype, window)
        return attend_pass(plan, query, keys, values, scale, cap, sinks)

    def _row_attention(
        self, heads: Heads, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> RowAttention | None:
        """The compiled attention of a layer; None if it does not support the layer or is slower."""
        kind = (heads, query.dtype, query.stride(), keys.shape, scale)
        if kind not in self._rows:
            fits = can_attend(query, keys, values)
            if fits and self._decodes and may_share(*self._slots.shape):
                fits = self._plan(heads, query.dtype, None).prefixes is None
            place = (self._slots, self._kv_lens, self._new_lens, heads, query.shape[2], scale)
            self._rows[kind] = RowAttention(*place, self._visible) if fits else None
        return self._rows[kind]

    def _block_plans(self, heads: Heads, dtype: torch.dtype, window: int | None) -> list[BlockPlan]:
        """The plan of each request, as `_plan` for long extends."""
        kind = (heads, dtype, window)
        if kind not in self._blocks:
            self._blocks[kind] = [
                BlockPlan(slots[:total].long(), new, heads, dtype, window)
                for slots, total, new in zip(
                    self._slots, self._kv_lens.tolist(), self._new_lens, strict=True
                )
            ]
        return self._blocks[kind]

    def _plan(self, heads: Heads, dtype: torch.dtype, window: int | None) -> PassPlan:
        """The plan of a layer. Layers with the same heads, dtype and window share one."""
        kind = (heads, dtype, window)
        if kind not in self._plans:
            self._plans[kind] = plan_pass(
                self._slots,
                self._kv_lens,
                self._new_lens,
                heads,
                dtype,
                visible=self._visible,
                window=window,
                shares=self._decodes,
            )
        return self._plans[kind]


def _trees(spec_info: Any, bs: int) -> tuple[list[int], Tensor]:
    """The number of nodes of each request's tree, and the nodes that each node sees.

    The second result is bool [bs, D, D]. Without a mask the trees are chains.
    """
    width = int(spec_info.draft_token_num)
    layout, mask = spec_info.ragged_verify_layout, spec_info.custom_mask
    lens = [width] * bs if layout is None else layout.verify_lens_cpu
    if mask is None or mask.numel() == 0:
        return lens, torch.ones(width, width, dtype=torch.bool).tril().expand(bs, width, width)
    return lens, mask[: bs * width * width].view(bs, width, width).bool()


def _host_list(on_host: list[int] | None, tensor: Tensor) -> list[int]:
    return [int(n) for n in on_host] if on_host is not None else [int(n) for n in tensor.tolist()]


def _absorb() -> None:
    """Let SGLang's layers of multi-head latent attention compute all passes in the absorbed form.

    In the other form SGLang writes the cache with a Triton kernel.
    """
    # Only models with such layers need SGLang's code for them.
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(NAME, lambda *_: AttnForwardMethod.MLA)


def register() -> None:
    """Register `--attention-backend qspec_cpu`; repeated calls have no further effect."""
    register_attention_backend(NAME)(CpuAttention)
    add_attention_backend_choices([NAME])
