"""The likeliest token of each row of logits, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def likeliest(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)` for float [n, vocab]: int64 [n], the lowest id among equals.

    On a CPU torch's own is not vectorised, its maximum is: with one maximum to a block of ids, the
    argmax is searched among the blocks and then in one of them.
    """
    logits = logits.float()  # maxima of bfloat16 are not vectorised either
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    blocks = logits.unflatten(1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    return best * BLOCK + blocks[torch.arange(len(blocks)), best].argmax(-1)
