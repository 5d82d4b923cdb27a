"""Access to the compiled products and decoder, where the processor supports them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_drafts_only = False


@cache
def native() -> Any:
    """Return `sglang_qspec.cpu._native`; None without AVX-512 and VNNI, or if it was not built."""
    if not (torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()):
        return None
    try:
        # Its instructions would end the process on other processors.
        from sglang_qspec.cpu import _native
    except ImportError:
        return None
    return _native


def use_for_drafts() -> None:
    """Declare that this process runs draft models only, which allows the compiled decoder.

    A target must compute the same output in passes of any shape, so its decoder stays in torch. A
    draft model may compute slightly different outputs.
    """
    global _drafts_only
    _drafts_only = True


def drafts_only() -> bool:
    """Whether `use_for_drafts` was called."""
    return _drafts_only
