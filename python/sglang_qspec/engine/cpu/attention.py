"""The attention backend `qspec_cpu`: SGLang's interface to `sglang_qspec.cpu.attention`.

It computes plain causal self-attention. Other layers (cross attention, encoders, hybrid
sliding-window pools) use the inherited torch_native code, which cannot verify trees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_qspec.cpu.attention import RowPlan, attend_block, attend_rows, plan_rows, plan_sharing

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

NAME = "qspec_cpu"
_SHORT_EXTEND = 32
"""Maximum number of new tokens per request for which an extend runs as one padded batch."""
_FEWEST_SAVED = 16
"""Minimum number of padded query rows that a second group of requests must save, because each group
takes its own torch calls."""


class CpuAttention(TorchNativeAttnBackend):
    """Attention of decode, extend and TARGET_VERIFY on the CPU, planned once per forward pass."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._batch: _Batch | None = None
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
        self._batch = None
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
    ) -> Tensor:
        if not self.is_plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        if not self.is_plain(layer):
            if forward_batch.forward_mode.is_target_verify():
                raise NotImplementedError(
                    f"attention backend {NAME} cannot verify draft trees in layer "
                    f"{layer.layer_id}: only plain causal self-attention is supported"
                )
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def is_plain(self, layer: RadixAttention) -> bool:
        """Whether `sglang_qspec.cpu.attention` can compute the layer."""
        return (
            not layer.is_cross_attention
            and layer.attn_type == AttentionType.DECODER
            and not self.use_sliding_window_kv_pool
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> Tensor:
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save_kv_cache and k is not None and v is not None:
            output = self.store_and_attend(query, k, v, layer, forward_batch)
        else:
            output = self._read(query, layer, forward_batch)
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def store_and_attend(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> Tensor:
        """Write `k` and `v` [tokens, kv_heads, dim] to the cache, then compute the attention.

        `query` and the result are [tokens, heads, dim].
        """
        batch = self._batch_of(forward_batch)
        pool = self.token_to_kv_pool
        if self.plain_pool is not None and k.dtype == pool.dtype:
            place = layer.layer_id - pool.start_layer
            pool.k_buffer[place].index_copy_(0, batch.written, k)
            pool.v_buffer[place].index_copy_(0, batch.written, v)
        else:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self._read(query, layer, forward_batch)

    def _read(self, query: Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> Tensor:
        pool = self.token_to_kv_pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return self._batch_of(forward_batch).attend(query, keys, values, layer)

    def _batch_of(self, forward_batch: ForwardBatch) -> _Batch:
        if self._batch is None:
            self._batch = _Batch(forward_batch, self.req_to_token_pool.req_to_token)
        return self._batch


class _Batch:
    """The requests of one forward pass, in groups with similar numbers of new tokens."""

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
        self.written = forward_batch.out_cache_loc.long()
        self._kv_lens, self._new_lens = kv_lens, new_lens
        self._slots = req_to_token[forward_batch.req_pool_indices.long(), : int(kv_lens.max())]
        self._groups: list[_Group] = []
        self._order: Tensor | None = None
        decodes = mode.is_target_verify() or mode.is_decode()
        rows = max(new_lens, default=0)
        if not decodes and rows > _SHORT_EXTEND:
            return
        if not decodes:
            visible = torch.ones(rows, rows, dtype=torch.bool).tril().expand(bs, rows, rows)
        self._plan_groups(visible, decodes)

    def _plan_groups(self, visible: Tensor | None, decodes: bool) -> None:
        """Fill `_groups`. `visible` is bool [bs, D, D] over the new tokens of each request."""
        members = _similar(self._new_lens)
        if len(members) == 1:
            group = _Group(self._slots, self._kv_lens, self._new_lens, visible, decodes)
            self._groups.append(group)
            return
        lens = torch.tensor(self._new_lens)
        starts = lens.cumsum(0) - lens
        tokens: list[int] = []
        for rows in members:
            chosen, own = torch.tensor(rows), [self._new_lens[row] for row in rows]
            kv_lens = self._kv_lens[chosen]
            slots = self._slots[chosen, : int(kv_lens.max())]
            seen = None if visible is None else visible[chosen]
            group = _Group(slots, kv_lens, own, seen, decodes, starts[chosen])
            self._groups.append(group)
            for start, length in zip(starts[chosen].tolist(), own, strict=True):
                tokens += range(start, start + length)
        self._order = torch.tensor(tokens).argsort()

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, layer: RadixAttention) -> Tensor:
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        cap = float(layer.logit_cap)
        if not self._groups:
            if cap > 0.0:
                raise NotImplementedError(
                    f"attention backend {NAME} does not support a logit cap for prompts; "
                    "use --attention-backend torch_native"
                )
            return self._attend_blocks(query, keys, values, layer.scaling, window)
        results = [
            attend_rows(
                group.plan(keys.shape[1], query.dtype, window),
                query,
                keys,
                values,
                layer.scaling,
                cap,
            )
            for group in self._groups
        ]
        return results[0] if self._order is None else torch.cat(results)[self._order]

    def _attend_blocks(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        parts = query.split(self._new_lens)
        lens = self._kv_lens.tolist()
        results = [
            attend_block(part, keys, values, slots[:total].long(), scale, window)
            for part, slots, total in zip(parts, self._slots, lens, strict=True)
        ]
        return results[0] if len(results) == 1 else torch.cat(results)


class _Group:
    """Requests that get the same number of query rows: the largest number of new tokens among them.

    A request with fewer new tokens gets extra rows before its own rows. The extra rows repeat its
    first new token, and their results are dropped.
    """

    def __init__(
        self,
        slots: Tensor,
        kv_lens: Tensor,
        new_lens: list[int],
        visible: Tensor | None,
        decodes: bool,
        starts: Tensor | None = None,
    ) -> None:
        """`starts` int64 [n] has the place of each request's first token in the pass. By default
        the tokens of the requests follow each other."""
        self._slots, self._kv_lens, self._decodes = slots, kv_lens, decodes
        self._rows = rows = max(new_lens)
        self._plans: dict[tuple[int, torch.dtype, int], RowPlan] = {}
        self._taken: Tensor | None = None
        self._given: Tensor | None = None
        self._visible = None if visible is None or rows == 1 else visible[:, :rows, :rows]
        padded = min(new_lens) < rows
        if starts is None and not padded:
            return
        lens = torch.tensor(new_lens)
        if starts is None:
            starts = lens.cumsum(0) - lens
        offset = torch.arange(rows) - (rows - lens).unsqueeze(1)
        node = offset.clamp(min=0)
        self._taken = (starts.unsqueeze(1) + node).flatten()
        if not padded:
            return
        self._given = (offset >= 0).flatten().nonzero().flatten()
        if self._visible is not None:
            own = torch.arange(len(new_lens)).view(-1, 1, 1)
            # Columns before a request's own are committed text. All rows see it, as all see node 0.
            self._visible = self._visible[own, node.unsqueeze(2), node.unsqueeze(1)]

    def plan(self, kv_heads: int, dtype: torch.dtype, window: int | None) -> RowPlan:
        """The plan of a layer. Layers with the same head count, dtype and window share one."""
        kind = (kv_heads, dtype, 0 if window is None else window + 1)
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._make_plan(kv_heads, dtype, window)
            self._plans[kind] = plan
        return plan

    def _make_plan(self, kv_heads: int, dtype: torch.dtype, window: int | None) -> RowPlan:
        if self._decodes and window is None:
            plan = plan_sharing(
                self._slots, self._kv_lens, self._rows, kv_heads, dtype, self._visible
            )
        else:
            positions = None
            if window is not None:
                first = (self._kv_lens - self._rows).unsqueeze(1)
                positions = first + torch.arange(self._rows)
            plan = plan_rows(
                self._slots,
                self._kv_lens,
                self._rows,
                kv_heads,
                dtype,
                visible=self._visible,
                window=window,
                row_positions=positions,
            )
        if self._taken is None:
            return plan
        return replace(plan, taken=self._taken, given=self._given)


def _similar(lens: list[int]) -> list[list[int]]:
    """The requests in one group, or in two if that saves at least `_FEWEST_SAVED` padded rows.

    `lens` has the number of new tokens of each request. A group is padded to its largest number.
    """
    order = sorted(range(len(lens)), key=lens.__getitem__)
    longest = max(lens, default=0)
    most, first = len(lens) * longest - _FEWEST_SAVED, 0
    for count in range(1, len(order)):
        rows = count * lens[order[count - 1]] + (len(order) - count) * longest
        if rows <= most:
            most, first = rows - 1, count
    return [order[:first], order[first:]] if first else [list(range(len(lens)))]


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


def register() -> None:
    """Register `--attention-backend qspec_cpu`; repeated calls have no further effect."""
    register_attention_backend(NAME)(CpuAttention)
    add_attention_backend_choices([NAME])
