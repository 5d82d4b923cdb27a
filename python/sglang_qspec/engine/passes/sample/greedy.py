"""Chooses the tokens of greedy passes without drafts as those of passes with drafts.

SGLang's sampler calls torch's argmax. It gives the same tokens, and on a CPU it takes more than
twice the time of `likeliest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler

from sglang_qspec.verify.likeliest import likeliest

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_forward_without = Sampler.forward


def install() -> None:
    """Make SGLang's sampler choose with `likeliest`; repeated calls have no further effect."""
    Sampler.forward = _forward


def _forward(
    sampler: Any,
    logits_output: LogitsProcessorOutput,
    sampling_info: SamplingBatchInfo,
    return_logprob: bool,
    *more: Any,
    logprob_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """In place of `Sampler.forward`, which serves all passes that return more than tokens."""
    if (
        not sampling_info.is_all_greedy
        or return_logprob
        or logprob_logits is not None
        or sampling_info.sampling_mask_batch_indices is not None
    ):
        return _forward_without(
            sampler,
            logits_output,
            sampling_info,
            return_logprob,
            *more,
            logprob_logits=logprob_logits,
        )
    logits = sampler._preprocess_logits(logits_output.next_token_logits, sampling_info)
    token_ids = likeliest(logits)
    sampler._sync_token_ids_across_tp(token_ids, sampling_info)
    return token_ids
