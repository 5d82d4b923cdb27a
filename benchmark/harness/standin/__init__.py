"""Stand-ins in torch for the functions of sgl_kernel that a dense model needs on a GPU.

The wheel of sgl_kernel loads only beside the torch release that it was compiled with, and its norms
do not take float32. On a machine with another torch, and for servers in float32 on a GPU, this
folder is on the path of the processes, which find the package `sgl_kernel` in it. Only benchmarks
and `gpu-check` use the stand-ins: they are right, but not fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
BACKEND = "triton"
"""Attention backend of target and sidecar; it needs no function that the stand-ins lack."""
FLAGS = (
    *("--attention-backend", BACKEND, "--speculative-draft-attention-backend", BACKEND),
    *("--sampling-backend", "pytorch"),
)
"""Flags of a server with the stand-ins."""


@cache
def import_error() -> str | None:
    """Why the real `sgl_kernel` does not load in a new process, in one line; None if it does."""
    real = {**os.environ, "PYTHONPATH": os.pathsep.join(_path(os.environ))}
    command = [sys.executable, "-c", "import sgl_kernel"]
    done = subprocess.run(command, capture_output=True, text=True, env=real)
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def environment(present: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which a process finds the stand-ins first, and SGLang accepts them."""
    return {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *_path(present)]),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # SGLang's radix tree in Rust reads tensors as the torch release of its wheel lays them out.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }


def _path(present: Mapping[str, str]) -> list[str]:
    """PYTHONPATH without the stand-ins."""
    parts = present.get("PYTHONPATH", "").split(os.pathsep)
    return [part for part in parts if part and part != str(FOLDER)]
