"""Verifies drafts of an answer in the pass over its prompt.

The sidecar drafts for a request while the request waits. So a request can have drafts before its
first output token. The pass over the last chunk of the prompt also runs a chain of draft tokens
after the prompt. The pass gives the logits of the last prompt token and of each draft token, and
`sample_and_accept` accepts draft tokens as in any verify pass. With k accepted draft tokens the
pass yields k + 1 output tokens instead of one.

SGLang's processing of a prefill adds one token to the output. The hook on `Req.update_finish_state`
adds the other k tokens with `commit` (`engine.scheduler.endings`).

The draft tokens use KV slots that SGLang would reserve for the first decode pass. `reserve`
allocates these slots when SGLang prepares the prefill. It runs on the scheduler's stream, as
SGLang's own reservation for decode passes does.

Attention of a prefill is causal, so the drafts of a request are a chain.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.runtime_context import get_exec

from sglang_qspec.engine import speculator
from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput, verify_input_of
from sglang_qspec.engine.passes.outcome import ComingOutcome
from sglang_qspec.engine.passes.outputs import last_ids_of, outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.staging import host_waits, stage
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PrefillRows
from sglang_qspec.policy.runtime_settings import RuntimeSettings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

GRAPHS = ("disabled", "breakable")
"""Graph backends of SGLang's prefills that run the logits processor outside the CUDA graph."""

_rows: torch.Tensor | None = None
"""int64 [R]: places of the tokens at which the prefill gives logits; None lets SGLang choose."""
_coming: WeakKeyDictionary[Any, _Coming] = WeakKeyDictionary()
"""By SGLang's request object: its prefill, until all tokens of the prefill are in the output."""
_late: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""By SGLang's request object: number of tokens that joined the output, but have not been searched
for a stop."""


class _Coming(NamedTuple):
    """The prefill of a request, which SGLang may not have processed yet."""

    outcome: ComingOutcome
    row: int
    """Place of the request in the batch of the prefill."""
    output_len: int
    """Output length before the prefill, in tokens."""


class PrefillDrafts(NamedTuple):
    """The drafts that a prefill verifies."""

    proposal: Proposal
    verify_input: TreeVerifyInput
    """The verified rows: the last prompt token and the draft tokens of each request."""
    order: torch.Tensor
    """int64 [T]: the place of each token of the pass in the list of all prompt tokens, followed by
    all draft tokens."""
    rows: torch.Tensor
    """int64 [R]: the place of each row of `verify_input` among the tokens of the pass."""
    drafted: torch.Tensor
    """int64 [n]: the rows of `verify_input` that are draft tokens."""
    counts: torch.Tensor
    """int64 [bs]: the number of draft tokens of each request."""


class PrefillProposer:
    """Chooses the drafts that prefills verify."""

    def __init__(self, active: Speculator, runtime: RuntimeSettings, policy: PrefillRows) -> None:
        self._speculator = active
        self._runtime = runtime
        self.policy = policy

    def propose(self, batch: ScheduleBatch) -> PrefillDrafts | None:
        """Choose drafts for a prefill; None if no draft is worth its row."""
        if not self._runtime.prefill_drafts or not self._runtime.enabled or not can_verify(batch):
            return None
        reqs = batch.reqs
        rooms = np.array([_room(req) for req in reqs], np.int64)
        if not rooms.any():
            return None
        rids = [req.rid for req in reqs]
        trees = self._speculator.propose(
            rids, outputs_of(reqs), self._runtime.draft_token_num, roots=last_ids_of(reqs).tolist()
        )
        chains = trees.chains()
        least = 0.0
        if not self._runtime.fixed_width:
            least = self.policy.least_chance(max(1, self._speculator.running))
        chances = chains.scores * self._speculator.factors(rids)[:, None]
        chosen = chains.cut(self.policy.lengths(chances, rooms, least))
        return None if chosen.width == 1 else _drafts_of(batch, Proposal(chosen, trees))

    @contextmanager
    def timed(self, batch: ScheduleBatch) -> Iterator[None]:
        """Measure the prefill within this context, on a device where the host waits for it."""
        began = time.monotonic()
        yield
        if host_waits(batch.device) and batch.input_ids is not None:
            self.policy.observe(len(batch.input_ids), time.monotonic() - began)


def can_verify(batch: ScheduleBatch) -> bool:
    """Whether the prefill of this batch can verify drafts.

    SGLang's processing of a prefill handles log probabilities, hidden states, grammars, reasoning
    and sampling masks for one token only. A batch with images or watermarks runs without drafts, as
    in decode passes.
    """
    info = batch.sampling_info
    return not (
        not batch.forward_mode.is_extend_without_speculative()
        or batch.is_prefill_only
        or batch.decoding_reqs
        or batch.return_logprob
        or batch.return_hidden_states
        or batch.has_grammar
        or batch.input_embeds is not None
        or batch.replace_embeds is not None
        or batch.model_config.self_opened_think_start_ids
        or info.has_watermark_candidates
        or any(info.return_sampling_masks or ())
        or any(map(_is_special, batch.reqs))
    )


def _is_special(req: Any) -> bool:
    return bool(
        req.multimodal_inputs is not None
        or req.require_reasoning
        or req.session is not None
        or req.beam_group is not None
        or req.return_routed_experts
        or req.return_indexer_topk
    )


def _room(req: Any) -> int:
    """Maximum number of draft tokens in the prefill; 0 if the chunk is not the prompt's last."""
    if req.extend_end != len(req.full_untruncated_fill_ids) or req.to_finish is not None:
        return 0
    reserved: int = req.kv.kv_allocated_len - req.extend_end
    # The target's own token comes after the drafts.
    remaining: int = req.sampling_params.max_new_tokens - len(req.output_ids) - 1
    return max(0, min(reserved, remaining, _most_drafts()))


def _most_drafts() -> int:
    """Maximum number of draft tokens that SGLang's relay holds beside the target's own token."""
    active = speculator.active()
    return 0 if active is None else active.runtime_settings.draft_token_num - 1


def reserve(result: None, batch: ScheduleBatch) -> None:
    """After `ScheduleBatch.prepare_for_extend`: allocate KV slots for the drafts of a prefill."""
    active = speculator.active()
    if active is None or not active.runtime_settings.prefill_drafts:
        return
    if str(get_exec().graph.cuda_graph_config.prefill.backend) not in GRAPHS:
        return
    places = [
        place
        for place, req in enumerate(batch.reqs)
        if req.extend_end == len(req.full_untruncated_fill_ids) and active.live(req.rid)
    ]
    most = _most_drafts()
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
    (chosen,) = stage(batch.device, np.array(places, np.int64))
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


def _drafts_of(batch: ScheduleBatch, proposal: Proposal) -> PrefillDrafts:
    trees = proposal.trees
    lens = np.array(batch.extend_lens, np.int64)
    sizes = trees.sizes.astype(np.int64)
    order, rows = places_of(lens, sizes - 1)
    roots = sizes.cumsum() - sizes
    drafted = np.delete(np.arange(sizes.sum()), roots)
    staged = stage(batch.device, order, rows, drafted, sizes - 1)
    verify_input = verify_input_of(trees, batch.seq_lens - 1, batch.device, full_mask=False)
    return PrefillDrafts(proposal, verify_input, *staged)


def places_of(
    lens: NDArray[np.int64], drafts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order of a pass's tokens, and the places of its verified rows; all int64.

    `lens` [bs] are the numbers of prompt tokens, and `drafts` [bs] the numbers of draft tokens. The
    order [T] has the tokens of each prompt, then the draft tokens of its request. An entry is a
    place in the list of all prompt tokens, followed by all draft tokens. The rows [R] are the
    places of each prompt's last token and its draft tokens in the pass.
    """
    prompts, chains = np.arange(lens.sum()), lens.sum() + np.arange(drafts.sum())
    ends = lens.cumsum()
    order = np.insert(prompts, ends.repeat(drafts), chains)
    whole = (lens + drafts).cumsum()
    rows = [
        np.arange(end - count - 1, end)
        for end, count in zip(whole.tolist(), drafts.tolist(), strict=True)
    ]
    return order, np.concatenate(rows)


def with_drafts(batch: ScheduleBatch, drafts: PrefillDrafts) -> ScheduleBatch:
    """A copy of the batch; the pass over the copy also runs the drafts."""
    batch = copy.copy(batch)
    verify_input, drafted = drafts.verify_input, drafts.drafted
    counts = (drafts.proposal.trees.sizes - 1).tolist()
    owners, offsets = verify_input.owners[drafted], verify_input.offsets[drafted]
    slots = batch.req_to_token_pool.req_to_token[
        batch.req_pool_indices[owners], batch.seq_lens[owners] + offsets - 1
    ]
    ids = verify_input.input_ids[drafted]
    batch.input_ids = torch.cat((batch.input_ids, ids.to(batch.input_ids.dtype)))[drafts.order]
    places = batch.out_cache_loc
    batch.out_cache_loc = torch.cat((places, slots.to(places.dtype)))[drafts.order]
    batch.seq_lens = batch.seq_lens + drafts.counts
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(counts)
    batch.extend_lens = [
        length + more for length, more in zip(batch.extend_lens, counts, strict=True)
    ]
    batch.extend_num_tokens += sum(counts)
    batch.seq_lens_sum = None
    return batch


@contextmanager
def logits_at(rows: torch.Tensor) -> Iterator[None]:
    """Within this context a prefill gives the logits at the tokens `rows` int64 [R]."""
    global _rows
    _rows = rows
    try:
        yield
    finally:
        _rows = None


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
    if _rows is None:
        return prune(processor, hidden_states, before_norm, aux, metadata)
    rows = _rows
    pruned_aux = aux
    if aux is not None:
        is_packed = isinstance(aux, torch.Tensor)
        pruned_aux = aux[rows] if is_packed else [states[rows] for states in aux]
    pruned_before = None if before_norm is None else before_norm[rows]
    return hidden_states[rows], pruned_before, pruned_aux, None, None, []


def keep(reqs: Sequence[Any], outcome: ComingOutcome) -> None:
    """Keep the outcome of a prefill until SGLang processes it."""
    for row, req in enumerate(reqs):
        _coming[req] = _Coming(outcome, row, len(req.output_ids))


def forget(reqs: Sequence[Any]) -> None:
    """Drop the earlier prefills of `reqs`; a retracted request has one."""
    for req in reqs:
        _coming.pop(req, None)


def commit(req: Any) -> int:
    """Add the accepted tokens after the first one, which SGLang has just added to the output.

    Returns the number of added tokens that have not been searched for a stop. It includes tokens
    that `recover` has added.
    """
    coming = _coming.pop(req, None)
    late = _late.pop(req, 0)
    if coming is None:
        return late
    more = coming.outcome.read().tokens[coming.row][1:]
    req.output_ids.extend(more)
    req.kv.kv_committed_len += len(more)
    return late + len(more)


def recover(reqs: Sequence[Any]) -> None:
    """After an error, add the tokens of prefills that SGLang has processed without `commit`.

    These tokens are searched for a stop when the next tokens join the output.
    """
    for req in reqs if _coming else ():
        coming = _coming.get(req)
        if coming is not None and len(req.output_ids) > coming.output_len:
            _late[req] = commit(req)
