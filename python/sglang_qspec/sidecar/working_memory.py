"""Measures the working memory of a sidecar on a GPU, and compares it with the estimate.

SGLang allocates the KV before it captures CUDA graphs, because a graph contains the addresses of
the KV. So the KV is sized by an estimate of what graphs, backends and passes take, RUNTIME_BYTES,
and what they took is known only when the KV cannot change any more.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sglang_qspec.sidecar.memory import CONTEXT_BYTES, GIB, RUNTIME_BYTES, gib

logger = logging.getLogger(__name__)

TOLERANCE = GIB // 4
"""Working memory above RUNTIME_BYTES that is not worth a warning, in bytes."""


def fixed_bytes() -> int:
    """Bytes of the GPU that weights, KV and the table of rows take, after their allocation."""
    return int(torch.cuda.memory_reserved(0))


def working_bytes(fixed: int) -> int:
    """Bytes of the GPU that this process has taken so far besides the `fixed` ones.

    Memory outside torch, such as the CUDA context and loaded kernels, counts where NVML knows this
    process. In some containers it does not; then CONTEXT_BYTES stand for it.
    """
    known = torch.cuda.memory_reserved(0) + CONTEXT_BYTES
    return int(max(known, _process_bytes() or 0)) - fixed


def report(taken: int, fraction: float | None) -> None:
    """Log the working memory `taken`, in bytes, beside the estimate.

    If the sidecar has a `fraction` of the GPU, others count on the rest, and an excess is a
    warning.
    """
    excess = taken - RUNTIME_BYTES
    if fraction is None or excess <= TOLERANCE:
        words = "took %s of the GPU besides weights and KV; the estimate is %s"
        logger.info(words, gib(taken), gib(RUNTIME_BYTES))
        return
    share = excess / torch.cuda.mem_get_info(0)[1]
    logger.warning(
        "took %s of the GPU besides weights and KV, but the estimate is %s: the sidecar takes %.2f "
        "of the GPU instead of %.2f. If this GPU runs out of memory, lower the target's "
        "--mem-fraction-static by %.2f, or without a target on it --mem-fraction "
        "(--speculative-qspec-mem-fraction)",
        gib(taken),
        gib(RUNTIME_BYTES),
        fraction + share,
        fraction,
        share,
    )


def _process_bytes() -> int | None:
    """Bytes of the GPU that NVML counts for this process; None if it does not know the process."""
    try:
        import pynvml  # SGLang requires it

        handle = torch.cuda._get_pynvml_handler(0)
        running: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((each.usedGpuMemory for each in running if each.pid == os.getpid()), None)
    except Exception:  # such as of a MIG instance; no measurement may end a sidecar
        logger.debug("NVML does not count the memory of this process", exc_info=True)
        return None
