"""Verifies drafts of an answer in the pass over its prompt.

The sidecar drafts for a request while the request waits. So a request can have drafts before its
first output token. The pass over the last chunk of the prompt also runs a chain of draft tokens
after the prompt. The pass gives the logits of the last prompt token and of each draft token, and
`sample_and_accept` accepts draft tokens as in any verify pass. With k accepted draft tokens the
pass yields k + 1 output tokens instead of one.

The draft tokens use KV slots that SGLang would reserve for the first decode pass
(`launch.prefill_hooks`). SGLang's processing of a prefill adds one token to the output, and
`passes.prefill_tokens` adds the others.

Attention of a prefill is causal, so the drafts of a request are a chain.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput, verify_input_of
from sglang_qspec.engine.passes.outputs import last_ids_of, outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PrefillRows
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.transfers import host_waits, to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


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
        most = self._runtime.draft_token_num - 1
        rooms = np.array([_room(req, most) for req in reqs], np.int64)
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


def _room(req: Any, most: int) -> int:
    """Maximum number of draft tokens in the prefill; 0 if the chunk is not the prompt's last.

    `most` is the number of draft tokens of the widest pass.
    """
    if req.extend_end != len(req.full_untruncated_fill_ids) or req.to_finish is not None:
        return 0
    reserved: int = req.kv.kv_allocated_len - req.extend_end
    # The target's own token comes after the drafts.
    remaining: int = req.sampling_params.max_new_tokens - len(req.output_ids) - 1
    return max(0, min(reserved, remaining, most))


def _drafts_of(batch: ScheduleBatch, proposal: Proposal) -> PrefillDrafts:
    trees = proposal.trees
    lens = np.array(batch.extend_lens, np.int64)
    sizes = trees.sizes.astype(np.int64)
    order, rows = places_of(lens, sizes - 1)
    roots = sizes.cumsum() - sizes
    drafted = np.delete(np.arange(sizes.sum()), roots)
    staged = to_device(batch.device, order, rows, drafted, sizes - 1)
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
