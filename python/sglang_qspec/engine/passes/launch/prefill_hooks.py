"""What a prefill with drafts needs of SGLang: KV slots for the drafts, and logits at each of them.

`reserve` allocates the slots when SGLang prepares the prefill. It runs on the scheduler's stream,
as SGLang's own reservation for decode passes does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.runtime_context import get_exec

from sglang_qspec.engine import speculation
from sglang_qspec.engine.passes.launch.prefill import can_verify
from sglang_qspec.transfers import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

GRAPHS = ("disabled", "breakable")
"""Graph backends of SGLang's prefills that run the logits processor outside the CUDA graph."""

_logits_rows: ContextVar[torch.Tensor | None] = ContextVar("_logits_rows", default=None)
"""int64 [R]: places of the tokens at which the present prefill gives logits; None lets SGLang
choose. SGLang passes nothing of the worker's to the function that the hook wraps."""


def reserve(result: None, batch: ScheduleBatch) -> None:
    """After `ScheduleBatch.prepare_for_extend`: allocate KV slots for the drafts of a prefill."""
    active = speculation.active()
    if active is None or not active.runtime_settings.prefill_drafts:
        return
    if str(get_exec().graph.cuda_graph_config.prefill.backend) not in GRAPHS:
        return
    places = [
        place
        for place, req in enumerate(batch.reqs)
        if req.extend_end == len(req.full_untruncated_fill_ids) and active.live(req.rid)
    ]
    most = active.runtime_settings.draft_token_num - 1
    if not places or not most or not can_verify(batch):
        return
    reqs = [batch.reqs[place] for place in places]
    allocator = batch.token_to_kv_pool_allocator
    current, wanted, needed = page_aligned_decode_alloc_lens(
        reqs, reserve=most, page_size=allocator.page_size
    )
    # Drafts must not evict a cached prompt or make a later request wait.
    if allocator.available_size() < needed + len(reqs) * allocator.page_size:
        return
    (chosen,) = to_device(batch.device, np.array(places, np.int64))
    current_cpu, wanted_cpu = (torch.tensor(lens, dtype=torch.int32) for lens in (current, wanted))
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=reqs,
        req_pool_indices=batch.req_pool_indices[chosen],
        cur_kv_lens=current_cpu.to(batch.device, non_blocking=True),
        cur_kv_lens_cpu=current_cpu,
        nxt_kv_lens=wanted_cpu.to(batch.device, non_blocking=True),
        nxt_kv_lens_cpu=wanted_cpu,
        num_needed_tokens=needed,
        batch=batch,
    )


@contextmanager
def logits_at(rows: torch.Tensor) -> Iterator[None]:
    """Within this context a prefill gives the logits at the tokens `rows` int64 [R]."""
    outer = _logits_rows.set(rows)
    try:
        yield
    finally:
        _logits_rows.reset(outer)


def prune_states(
    prune: Callable[..., Any],
    processor: Any,
    hidden_states: torch.Tensor,
    before_norm: torch.Tensor | None,
    aux: Any,
    metadata: Any,
) -> Any:
    """Around `LogitsProcessor._get_pruned_states`, which takes the last token of each request.

    Within `logits_at` this hook takes the chosen tokens instead. The result has the form of
    SGLang's function: hidden states, hidden states before the last norm and auxiliary states at
    these tokens, then no indices for log probabilities.
    """
    rows = _logits_rows.get()
    if rows is None:
        return prune(processor, hidden_states, before_norm, aux, metadata)
    pruned_aux = aux
    if aux is not None:
        is_packed = isinstance(aux, torch.Tensor)
        pruned_aux = aux[rows] if is_packed else [states[rows] for states in aux]
    pruned_before = None if before_norm is None else before_norm[rows]
    return hidden_states[rows], pruned_before, pruned_aux, None, None, []
