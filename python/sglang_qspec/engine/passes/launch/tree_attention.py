"""Which masks the attention backends of a device read, and which verify passes they can run.

Backends on CPUs read the mask of the tree alone. Backends on GPUs also read the mask of the prefix.
QSPEC's own backend for CPUs also runs ragged passes, over trees of different sizes.
On GPUs ragged passes take chains, and so do all passes of models with sliding windows
(`engine.cuda.backends`).
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_qspec.config import QSpecConfig, flag
from sglang_qspec.engine.cuda import backends
from sglang_qspec.errors import ConfigError

RAGGED_TREES = ("qspec_cpu",)
"""Attention backends that run ragged passes over trees."""


class Verification(NamedTuple):
    """How verify passes run on a device."""

    ragged: bool
    """Whether passes are ragged at the start."""
    can_change: bool
    """Whether a running server can change `ragged`."""
    chains: bool
    """Whether passes take only one path of each tree."""

    @property
    def allowed(self) -> tuple[int, int]:
        """Smallest and largest value of the runtime setting `ragged`."""
        return (0, 1) if self.can_change else (int(self.ragged), int(self.ragged))


def verification_of(settings: QSpecConfig, device: str, backend: str | None) -> Verification:
    """How passes run on `device` with an attention `backend` of SGLang.

    `auto` is ragged on CPUs, because ragged trees yield more tokens at equal rows
    (docs/results.md). On a GPU the start of the server decides (`engine.cuda.backends`). Raises
    ConfigError if the setting asks for ragged passes that the backend cannot run.
    """
    if not device.startswith("cpu"):
        ragged = backends.is_ragged()
        return Verification(ragged, can_change=False, chains=backends.are_chains())
    can_be_ragged = backend in RAGGED_TREES and settings.verify != "tree"
    if settings.verify == "ragged" and not can_be_ragged:
        raise ConfigError(
            f"{flag('verify')} is 'ragged', but the attention backend {backend!r} on {device!r} "
            f"verifies one width: it must be 'auto' or 'tree', or --attention-backend must be "
            f"{' or '.join(RAGGED_TREES)}"
        )
    return Verification(can_be_ragged, can_be_ragged, chains=False)


def reads_full_mask(device: str) -> bool:
    """Whether a mask also covers the prefix: [D, seq_len + D] for each request, not [D, D]."""
    return not device.startswith("cpu")
