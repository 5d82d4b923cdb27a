"""What the attention backends of a device expect of draft trees.

SGLang's backends for CPUs read the mask of the tree alone, and take its width from the pass. On
GPUs they also read the mask of the prefix, and CUDA graphs have one width.
"""

from __future__ import annotations


def reads_full_mask(device: str) -> bool:
    """Whether a mask covers the prefix too, as [D, seq_len + D] for each request."""
    return not device.startswith("cpu")


def has_one_width(device: str) -> bool:
    """Whether every verify pass has the width for which SGLang captured CUDA graphs."""
    return not device.startswith("cpu")
