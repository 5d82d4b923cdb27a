"""Batches of fake CUDA tensors, for tests that count what a pass costs the host.

Fake CUDA tensors have shapes and devices, but no values (`test.verify.fake_cuda`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_qspec.engine.passes.sample import penalties, sample
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.trie import DraftTrees, Source
from test.verify.fake_cuda import CUDA

WIDTH, VOCAB = 8, 2000


class Req:
    """The part of SGLang's request that a pass reads."""

    eos_token_ids = frozenset({5})
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    origin_input_ids = (0,) * 98
    multimodal_inputs = customized_info = None

    def __init__(self, params: dict[str, Any]) -> None:
        self.sampling_params = SamplingParams(**params)
        self.sampling_params.normalize(self.tokenizer)
        self.rid = "a"
        self.output_ids = [1, 2, 3]


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context with a server's sampling seeds, and doubles for kernels that need a real GPU."""
    sample_from_probs = Sampler._sample_from_probs
    sampling_seeds.install()
    monkeypatch.setattr(sample, "verify_tree_greedy_func", lambda **_tensors: None)
    monkeypatch.setattr(sample, "sanitize_nan_logits", lambda *_: None)
    yield
    Sampler._sample_from_probs = sample_from_probs
    penalties._counts_on.cache_clear()


def trees_of(count: int) -> DraftTrees:
    """Chains of different sizes."""
    shape = (count, WIDTH)
    chain = np.maximum(np.arange(WIDTH, dtype=np.int32) - 1, 0)
    return DraftTrees(
        np.full(shape, 7, np.int32),
        np.broadcast_to(chain, shape).copy(),
        np.full(shape, Source.STEP, np.uint8),
        np.ones(shape, np.float32),
        (1 + np.arange(count, dtype=np.int32) % WIDTH),
    )


def info_of(reqs: list[Req]) -> SamplingBatchInfo:
    """The parameters on the device, as SGLang uploads them when the batch changes."""
    count, params = len(reqs), [req.sampling_params for req in reqs]
    return SamplingBatchInfo(
        temperatures=torch.ones(count, 1, device=CUDA),
        top_ps=torch.ones(count, device=CUDA),
        top_ks=torch.ones(count, dtype=torch.int32, device=CUDA),
        min_ps=torch.zeros(count, device=CUDA),
        is_all_greedy=all(p.top_k == 1 for p in params),
        is_any_greedy=any(p.top_k == 1 for p in params),
        need_top_p_sampling=any(p.top_p < 1 for p in params),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        vocab_size=VOCAB,
        return_sampling_masks=[False] * count,
    )
