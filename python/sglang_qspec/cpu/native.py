"""Access to the compiled products and decoder, where the processor supports them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

_drafts_only = False


@cache
def native() -> Any:
    """Return the module that `sglang_qspec/cpu/_native.pyi` describes, for this processor.

    None without AVX2, or if it was not built: instructions that a processor does not have would end
    the process. torch's variable ATEN_CPU_CAPABILITY (`avx2`, `default`) limits the instructions.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return None
    wide = capability == "AVX512" and torch.cpu._is_vnni_supported()
    name = "_native" if wide else "_native_avx2"
    try:
        return import_module(f"sglang_qspec.cpu.{name}")
    except ImportError:
        return None


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
