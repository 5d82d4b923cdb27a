"""Gives each sampled request a seed: its own `sampling_seed`, or a secret random one.

The random numbers of each sampled token depend only on the seed and the position
(`verify.seeded`). So a drafter with the same seed often samples the same token. A request that is
sent again with the same `sampling_seed` gets the same text.

With rejection sampling the server does not send secret seeds to the sidecar, and the target accepts
draft tokens by their draft probabilities (`engine.requests.step_proposals`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_qspec.engine.passes.staging import stage
from sglang_qspec.messages import SeededSampling
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, rank_limit_of, sample_probs

_seeds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Secret seeds by SGLang's request objects, which survive a retraction. The rid cannot be the key:
a client may send the same rid again, and must get another sample."""
_seeded = False
"""Whether this process samples with seeds."""
_rejecting = False
"""Whether the target accepts step drafts by rejection sampling."""
_proposals: Proposals | None = None
"""Proposals at the nodes of the present pass."""
_rank_limit: int | None = None
"""Largest number of tokens that a filtered request of the present pass keeps; None if unknown."""


def install(*, reject: bool = False) -> None:
    """Make SGLang's sampler draw with seeds. SGLang calls its sampler in passes without drafts.

    With `reject` the target accepts step drafts by rejection sampling.
    """
    global _seeded, _rejecting
    _rejecting = reject
    if _seeded:
        return
    _seeded = True
    sample_without = Sampler._sample_from_probs

    def sample(
        sampler: Any,
        probs: torch.Tensor,
        info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> Any:
        if info.sampling_seed is None:
            return sample_without(sampler, probs, info, positions, simple_sampling_case)
        return sample_probs(probs.float(), draws_of(info, positions)).int(), None

    Sampler._sample_from_probs = sample
    Sampler._sync_token_ids_across_tp = _take_tokens_of_rank_0


def _take_tokens_of_rank_0(sampler: Any, token_ids: torch.Tensor, info: SamplingBatchInfo) -> None:
    """In place of `Sampler._sync_token_ids_across_tp`: all ranks take the tokens of rank 0.

    Secret seeds and proposals for rejection sampling exist on rank 0 only. SGLang's own function
    takes the smallest token id of all ranks, which would change the distribution.
    """
    group = get_parallel().tp_group
    if group.world_size > 1:
        group.broadcast(token_ids, src=0)


def seeded_of(req: Any) -> SeededSampling | None:
    """Sampling seed and filters of a request; None for a greedy request or without `install`."""
    params = req.sampling_params
    if not _seeded or params.top_k == 1:
        return None
    rejects = _rejecting and params.sampling_seed is None
    return SeededSampling(
        seed=0 if rejects else _seed_of(req),
        temperature=params.temperature,
        top_k=min(params.top_k, TOP_K_ALL),
        top_p=params.top_p,
        min_p=params.min_p,
        probabilities=rejects,
    )


@contextmanager
def seeded_draws(batch: ScheduleBatch, proposals: Proposals | None = None) -> Iterator[None]:
    """Within this context a pass over `batch` samples with the seeds of its requests.

    `proposals` has the step-draft token at each node of the pass, for rejection sampling. Its
    tensors are on the host. Seeds and proposals take one transfer.
    """
    global _proposals, _rank_limit
    info = batch.sampling_info
    if (
        not _seeded
        or info is None
        or info.is_all_greedy
        or info.sampling_mask_batch_indices is not None  # masks describe SGLang's own draw
    ):
        yield
        return
    before = info.sampling_seed
    seeds = np.array([_seed_of(req) for req in batch.reqs], np.int64)
    drafted = () if proposals is None else proposals
    info.sampling_seed, *staged = stage(
        info.temperatures.device, seeds, *(values.numpy() for values in drafted)
    )
    _proposals = Proposals(*staged) if staged else None
    _rank_limit = rank_limit_of(req.sampling_params for req in batch.reqs)
    try:
        yield
    finally:
        _proposals = _rank_limit = None
        # SGLang would merge a batch with seeds and a batch without.
        info.sampling_seed = before


def draws_of(
    info: SamplingBatchInfo, positions: torch.Tensor, owners: torch.Tensor | None = None
) -> Draws:
    """Filters, seeds and proposals of each row; `positions` is int64 [R].

    `owners` int64 [R] is the request of each row; without it, each request has one row.
    """

    def per_node(values: torch.Tensor) -> torch.Tensor:
        return values.flatten() if owners is None else values.flatten()[owners]

    # SGLang marks the greedy requests of a mixed batch by top_k == 1.
    return Draws(
        per_node(info.top_ks) if info.need_top_k_sampling else None,
        per_node(info.top_ps) if info.need_top_p_sampling else None,
        per_node(info.min_ps) if info.need_min_p_sampling else None,
        None if info.sampling_seed is None else per_node(info.sampling_seed),
        positions,
        _proposals,
        _rank_limit,
    )


def _seed_of(req: Any) -> int:
    asked: int | None = req.sampling_params.sampling_seed
    if asked is not None:
        return asked
    return _seeds.setdefault(req, secrets.randbits(63))
