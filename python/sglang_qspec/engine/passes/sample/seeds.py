"""Gives each sampled request a seed: its own `sampling_seed`, or a secret random one.

The random numbers of each sampled token depend only on the seed and the position
(`verify.seeded`). So a drafter with the same seed often samples the same token. A request that is
sent again with the same `sampling_seed` gets the same text.

With rejection sampling the server does not send secret seeds to the sidecar, and the target accepts
draft tokens by their draft probabilities (`engine.requests.step_proposals`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.request_record import record_of
from sglang_qspec.messages import SeededSampling
from sglang_qspec.transfers import to_device
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, rank_limit_of, sample_probs

_DRAWS = "qspec_draws"
"""Attribute of the sampling info of a pass that draws with seeds."""
_sample_without = Sampler._sample_from_probs


class _PassDraws(NamedTuple):
    """What the draws of one pass need beside SGLang's sampling info."""

    proposals: Proposals | None
    """Proposals at the nodes of the pass; None without rejection sampling."""
    rank_limit: int | None
    """Largest number of tokens that a filtered request of the pass keeps; None if unknown."""


def install() -> None:
    """Make SGLang's sampler draw with seeds. SGLang calls its sampler in passes without drafts."""
    Sampler._sample_from_probs = _sample
    Sampler._sync_token_ids_across_tp = _take_tokens_of_rank_0


def _sample(
    sampler: Any,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> Any:
    """In place of `Sampler._sample_from_probs`, which also draws for passes without seeds."""
    if info.sampling_seed is None:
        return _sample_without(sampler, probs, info, positions, simple_sampling_case)
    return sample_probs(probs.float(), draws_of(info, positions)).int(), None


def _take_tokens_of_rank_0(sampler: Any, token_ids: torch.Tensor, info: SamplingBatchInfo) -> None:
    """In place of `Sampler._sync_token_ids_across_tp`: all ranks take the tokens of rank 0.

    Secret seeds and proposals for rejection sampling exist on rank 0 only. SGLang's own function
    takes the smallest token id of all ranks, which would change the distribution.
    """
    group = get_parallel().tp_group
    if group.world_size > 1:
        group.broadcast(token_ids, src=0)


def seeded_of(req: Any, *, reject: bool = False) -> SeededSampling | None:
    """Sampling seed and filters of a request; None for a greedy request.

    With `reject` the target accepts step drafts by rejection sampling.
    """
    params = req.sampling_params
    if params.top_k == 1:
        return None
    rejects = reject and params.sampling_seed is None
    return SeededSampling(
        seed=0 if rejects else _seed_of(req),
        temperature=params.temperature,
        top_k=min(params.top_k, TOP_K_ALL),
        top_p=params.top_p,
        min_p=params.min_p,
        probabilities=rejects,
    )


def seeded_draws(
    batch: ScheduleBatch, proposals: Proposals | None = None, lineup: Lineup | None = None
) -> AbstractContextManager[None]:
    """A context in which a pass over `batch` samples with the seeds of its requests.

    `proposals` has the step-draft token at each node of the pass, for rejection sampling. Its
    tensors are on the host. Seeds and proposals take one transfer. Without proposals, passes over
    one `lineup` share the seeds on the device.
    """
    info = batch.sampling_info
    if (
        info is None
        or info.is_all_greedy
        or info.sampling_mask_batch_indices is not None  # masks describe SGLang's own draw
    ):
        return nullcontext()
    device = info.temperatures.device
    if lineup is None or proposals is not None:
        return _drawing(info, *_staged(batch.reqs, device, proposals))
    if lineup.seeds is None:
        lineup.seeds = _staged(lineup.reqs, device, None)
    return _drawing(info, *lineup.seeds)


def _staged(
    reqs: Sequence[Any], device: torch.device, proposals: Proposals | None
) -> tuple[torch.Tensor, _PassDraws]:
    """The seeds int64 [bs] of the requests on the device, and what else their draws need."""
    seeds = np.array([_seed_of(req) for req in reqs], np.int64)
    drafted = () if proposals is None else proposals
    values, *staged = to_device(device, seeds, *(each.numpy() for each in drafted))
    limit = rank_limit_of(req.sampling_params for req in reqs)
    return values, _PassDraws(Proposals(*staged) if staged else None, limit)


@contextmanager
def _drawing(info: SamplingBatchInfo, seeds: torch.Tensor, draws: _PassDraws) -> Iterator[None]:
    before, info.sampling_seed = info.sampling_seed, seeds
    setattr(info, _DRAWS, draws)
    try:
        yield
    finally:
        delattr(info, _DRAWS)
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
        *getattr(info, _DRAWS, _PassDraws(None, None)),
    )


def _seed_of(req: Any) -> int:
    asked: int | None = req.sampling_params.sampling_seed
    if asked is not None:
        return asked
    record = record_of(req)
    if record.seed is None:
        record.seed = secrets.randbits(63)
    return record.seed
