"""Access to the compiled products and decoder, where the processor supports them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_drafts_only = False


@cache
def native() -> Any:
    """`sglang_qspec.cpu._native`; None without AVX-512 and VNNI, or if it was not built."""
    if not (torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()):
        return None
    try:
        from sglang_qspec.cpu import _native
    except ImportError:
        return None
    return _native


def use_for_drafts() -> None:
    """Declare that this process runs draft models only, so that the compiled decoder may be used.

    A target's passes must agree with each other whatever their shape, so its decoder
    stays in torch. A draft model's passes need not agree.
    """
    global _drafts_only
    _drafts_only = True


def drafts_only() -> bool:
    """Whether `use_for_drafts` was called."""
    return _drafts_only
