"""Whether the compiled products and decoder can be used, and for what."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_drafts_only = False


@cache
def native() -> Any:
    """`sglang_qspec.cpu._native`, or None without AVX-512 and VNNI or where it was not built."""
    if not (torch.cpu._is_avx512_supported() and torch.cpu._is_vnni_supported()):
        return None
    try:
        from sglang_qspec.cpu import _native
    except ImportError:
        return None
    return _native


def use_for_drafts() -> None:
    """This process runs draft models alone.

    A target's passes have to agree with each other whatever their shape, trees among them; a
    draft model's need not, so its decoder may be another.
    """
    global _drafts_only
    _drafts_only = True


def drafts_only() -> bool:
    """Whether `use_for_drafts` was called."""
    return _drafts_only
