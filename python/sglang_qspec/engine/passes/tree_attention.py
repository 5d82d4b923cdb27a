"""What the attention backends of a device expect of draft trees.

SGLang's backends for CPUs read the mask of the tree alone. On GPUs they also read the mask of the
prefix.
"""

from __future__ import annotations


def reads_full_mask(device: str) -> bool:
    """Whether a mask covers the prefix too, as [D, seq_len + D] for each request."""
    return not device.startswith("cpu")
