"""Divides the memory of a device between the target and the server's own sidecar."""

from __future__ import annotations

import math
from pathlib import Path

from sglang_qspec.config import SHARED_FRACTION, flag
from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadKind, is_head_folder, read
from sglang_qspec.heads.files import weight_files
from sglang_qspec.sidecar.memory import GIB, RUNTIME_BYTES, gib

EMBEDDING_BYTES = 2
"""Size of a number of the embeddings that a head reads on a GPU, in bytes."""
KV_BYTES = 2 * GIB
"""Minimum KV of the sidecar by default, in bytes, on a GPU that others use too."""
CONTEXT_BYTES = GIB
"""Memory of the target's CUDA context, in bytes. SGLang measures the free memory, to which its
fraction refers, when the context has already taken this memory."""
MOST_STATIC = 0.95
"""Largest fraction of a shared GPU's memory for the target's static memory and the sidecar
together. The rest is for the target's activations and graphs."""


def draft_bytes(path: str) -> int | None:
    """Size of a local draft model's weights, or of a head's with what it loads of the target.

    EAGLE heads need the embeddings, and EAGLE-2 heads the LM head too. None for a name on a hub.
    """
    folder = Path(path).expanduser()
    own = weight_bytes(path)
    if own is None or not is_head_folder(folder):
        return own
    head = read(folder)
    loaded = {HeadKind.MEDUSA: 0, HeadKind.EAGLE2: 2}.get(head.kind, 1)
    return own + loaded * EMBEDDING_BYTES * head.hidden_size * head.vocab_size


def weight_bytes(path: str) -> int | None:
    """Size of the weight files of a local checkpoint; None for a name on a hub."""
    sizes = [file.stat().st_size for file in weight_files(Path(path).expanduser())]
    return sum(sizes) if sizes else None


def default_fraction(gpu: Gpu | None, weights: int | None) -> float:
    """The sidecar's fraction of a GPU that others use too: SHARED_FRACTION, or more if needed."""
    if gpu is None or weights is None:
        return SHARED_FRACTION
    needed = (weights + RUNTIME_BYTES + KV_BYTES) / gpu.total
    return max(SHARED_FRACTION, min(MOST_STATIC, math.ceil(needed * 100) / 100))


def check_sidecar(placement: Placement, gpu: Gpu | None, weights: int | None) -> None:
    """Raise ConfigError if the sidecar's memory cannot hold a draft model of `weights` bytes."""
    if gpu is None or weights is None:
        return
    given = int((placement.mem_fraction or 1.0) * gpu.total)
    if given <= weights + RUNTIME_BYTES:
        raise ConfigError(
            f"{flag('mem_fraction')} is {placement.mem_fraction:g}, which is {gib(given)} of "
            f"{placement.device}, but the draft model has {gib(weights)} of weights and needs "
            f"{gib(RUNTIME_BYTES)} to run: give it more than "
            f"{(weights + RUNTIME_BYTES) / gpu.total:.2f}, a smaller draft model, or another "
            f"device ({flag('draft_device')})"
        )


def target_fraction(
    placement: Placement, gpu: Gpu | None, fraction: float, weights: int | None, *, given: bool
) -> float:
    """SGLang's `mem_fraction_static` for a target that shares its GPU with the sidecar.

    `fraction` is SGLang's own value, or the user's value if `given`; the user's value is kept.
    `weights` is the size of the target in bytes on this GPU, or None if unknown. Raises ConfigError
    if both models do not fit.
    """
    # SGLang's fraction refers to the memory that is free before the target's weights load.
    free = None if gpu is None else gpu.free - CONTEXT_BYTES
    taken = placement.mem_fraction * (1.0 if gpu is None or free is None else gpu.total / free)
    shown = f"{placement.mem_fraction:g} of {placement.device}"
    if gpu is not None:
        shown += f" ({gib(placement.mem_fraction * gpu.total)} of {gib(gpu.total)})"
    if given:
        if fraction + taken > MOST_STATIC:
            raise ConfigError(
                f"--mem-fraction-static is {fraction:g} and the sidecar takes {shown}, the same "
                f"GPU: both together may take {MOST_STATIC:g}; leave out --mem-fraction-static, "
                f"give at most {MOST_STATIC - taken:.2f}, or give the sidecar another device "
                f"({flag('draft_device')})"
            )
        return fraction
    left = math.floor((fraction - taken) * 1000) / 1000
    if left <= 0 or (weights is not None and free is not None and left * free <= weights):
        needed = "" if weights is None else f", and has {gib(weights)} of weights"
        has = "nothing" if free is None or left <= 0 else gib(left * free)
        raise ConfigError(
            f"the sidecar takes {shown}, so the target gets {has} of this GPU for weights and "
            f"KV{needed}: lower {flag('mem_fraction')}, take a smaller draft model, or give the "
            f"sidecar another device ({flag('draft_device')})"
        )
    return left
