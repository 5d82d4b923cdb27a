"""The likeliest token of each row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def likeliest(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)` for float [n, vocab]: int64 [n], the lowest id among equals.

    On a CPU torch vectorises the maximum but not the argmax. So this takes the maximum of each
    block of ids, and the argmax over the blocks and within the best block only.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    logits = logits.float()  # the maximum of bfloat16 is not vectorised
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    blocks = logits.unflatten(1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    return best * BLOCK + blocks[torch.arange(len(blocks)), best].argmax(-1)
