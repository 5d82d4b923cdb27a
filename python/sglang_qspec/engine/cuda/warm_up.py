"""Compiles the kernels of passes with drafts before the server is ready.

SGLang and Triton compile a kernel when it is first called, which takes seconds to minutes and would
stop the scheduler in the middle of serving. SGLang's capture of CUDA graphs has compiled what the
model itself needs.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

from sglang_qspec.verify.sample import Draws, sample_targets

logger = logging.getLogger(__name__)

MOST_MOVED = 256
"""Largest number of KV slots that SGLang moves at once. It compiles a kernel for each power of
two."""


def compile_kernels(model_runner: Any, device: str) -> None:
    """Call each kernel that a pass with drafts may call, and log how long that took.

    The KV that is moved is that of slot 0, which no request uses.
    """
    if torch.device(device).type != "cuda":
        return
    began = time.monotonic()
    _sample(model_runner.model_config.vocab_size, device)
    _accept(device)
    kv = model_runner.token_to_kv_pool_allocator.get_kvcache()
    count = 1
    while count <= MOST_MOVED:
        slots = torch.zeros(count, dtype=torch.int64, device=device)
        kv.move_kv_cache(slots, slots)
        count *= 2
    torch.get_device_module(device).synchronize()
    logger.info("The kernels of passes with drafts were ready in %.1f s.", time.monotonic() - began)


def _sample(vocab_size: int, device: str) -> None:
    """Draw with and without filters."""
    logits = torch.zeros(1, vocab_size, device=device)
    ones = torch.ones(1, device=device)
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    top_ks = torch.full((1,), 2, dtype=torch.int32, device=device)
    for draws in (Draws(), Draws(top_ks, ones, torch.zeros_like(ones), rank_limit=2)):
        sample_targets(logits, ones, draws._replace(seeds=numbers, positions=numbers))


def _accept(device: str) -> None:
    """Verify a root without drafts."""

    def numbers(value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1, 1), value, dtype=dtype, device=device)

    verify_tree_greedy_func(
        predicts=numbers(0, torch.int32).flatten(),
        accept_index=numbers(-1, torch.int32),
        accept_token_num=numbers(0, torch.int32).flatten(),
        candidates=numbers(0, torch.int64),
        retrieve_index=numbers(0, torch.int64),
        retrieve_next_token=numbers(-1, torch.int64),
        retrieve_next_sibling=numbers(-1, torch.int64),
        target_predict=numbers(0, torch.int64),
        topk=1,
    )
