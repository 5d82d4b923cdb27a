"""What the attention backends of a device expect of draft trees, and which passes they can run.

SGLang's backends for CPUs read the mask of the tree alone, and take its width from the pass. On
GPUs they also read the mask of the prefix, and CUDA graphs have one width. The backend of this
package for CPUs also runs ragged passes, over trees of different sizes.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_qspec.config import QSpecConfig, flag
from sglang_qspec.errors import ConfigError

RAGGED_TREES = ("qspec_cpu",)
"""Attention backends that run ragged passes over trees."""


class Verification(NamedTuple):
    """How verify passes run on a device."""

    can_be_ragged: bool
    """Whether the attention backend can run ragged passes."""
    ragged: bool
    """Whether passes are ragged at the start."""
    chains: bool
    """Whether ragged passes take only one path of each tree."""


def verification_of(settings: QSpecConfig, device: str, backend: str | None) -> Verification:
    """How passes run on `device` with an attention `backend` of SGLang.

    `auto` is ragged where the backend can run it, because ragged trees yield more tokens at equal
    rows (docs/results.md). Raises ConfigError if the setting asks for ragged passes that the
    backend cannot run.
    """
    can_be_ragged = device.startswith("cpu") and backend in RAGGED_TREES
    if settings.verify == "ragged" and not can_be_ragged:
        raise ConfigError(
            f"{flag('verify')} is 'ragged', but the attention backend {backend!r} on {device!r} "
            f"verifies one width: it must be 'auto' or 'tree', or --attention-backend must be "
            f"{' or '.join(RAGGED_TREES)} on a CPU"
        )
    return Verification(can_be_ragged, can_be_ragged and settings.verify != "tree", chains=False)


def reads_full_mask(device: str) -> bool:
    """Whether a mask covers the prefix too, as [D, seq_len + D] for each request."""
    return not device.startswith("cpu")


def has_one_width(device: str) -> bool:
    """Whether every verify pass has the width for which SGLang captured CUDA graphs."""
    return not device.startswith("cpu")
