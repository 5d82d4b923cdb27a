"""Divides the memory that a sidecar is given into weights, working memory and KV."""

from __future__ import annotations

import contextlib
import ctypes
import gc

from sglang_qspec.errors import DraftModelError

GIB = 1 << 30
CONTEXT_BYTES = GIB // 2
"""Estimated memory of the CUDA context of a sidecar, in bytes."""
RUNTIME_BYTES = CONTEXT_BYTES + 2 * GIB
"""Memory of a sidecar on a GPU besides weights, KV and the table of rows, in bytes. The value is an
estimate for 2048 prompt tokens and 256 rows in a pass, not measured on a GPU yet. Besides the CUDA
context it consists of 0.5 GiB for the attention backend, 0.7 for graphs, 0.2 for activations, and
0.6 for logits and sampling: four float32 arrays of 256 rows and 150,000 tokens. `working_memory`
measures what was taken."""


PROCESS_BYTES = GIB + GIB // 4
"""Memory of a sidecar on a CPU besides weights and KV, in bytes of its resident set. Python, torch
and SGLang take 1 GiB of it, of which 0.4 GiB are libraries that the server's processes share. The
rest is for passes. The sidecar shares the memory that its fork server had at the fork."""


def cpu_bytes(total: int, fraction: float) -> int:
    """Bytes that a sidecar takes of a CPU's memory of `total` bytes: with weights and KV in
    `fraction` of it."""
    return int(total * fraction) + PROCESS_BYTES


def kv_bytes(total: int, fraction: float, weights: int, runtime: int) -> int:
    """Bytes that remain for KV in `fraction` of a device with `total` bytes.

    `weights` and `runtime` are the bytes of the weights and of the working memory. Raises
    DraftModelError if nothing is left. The result does not depend on the free memory.
    """
    left = int(total * fraction) - weights - runtime
    if left <= 0:
        raise DraftModelError(
            f"{fraction:g} of the device's {gib(total)} is too little for a draft model with "
            f"{gib(weights)} of weights and {gib(runtime)} of working memory: give it more than "
            f"{(weights + runtime) / total:.2f} (--mem-fraction, --speculative-qspec-mem-fraction)"
        )
    return left


def table_bytes(rows: int, context_len: int) -> int:
    """Bytes of SGLang's table of the KV slots of each row, with a row for padding."""
    return 4 * (rows + 1) * context_len


def release_unused() -> None:
    """Return memory that this process has freed to the system.

    glibc keeps it, for example that of the weights before they were packed.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


def gib(size: float) -> str:
    """`size` in bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"
