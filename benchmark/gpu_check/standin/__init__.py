"""Stand-ins in torch for the functions of sgl_kernel that a dense model needs on a GPU.

The wheel of sgl_kernel loads only beside the torch release that it was compiled with. On a machine
with another torch, `gpu-check` puts this folder on the path of its processes, where they find the
package `sgl_kernel` below it. Nothing else uses it: the functions are right, but not fast.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
"""Flags of a server that needs no other function of sgl_kernel."""


@cache
def import_error() -> str | None:
    """Why `import sgl_kernel` fails in a new process, in one line; None if it works."""
    done = subprocess.run(
        [sys.executable, "-c", "import sgl_kernel"], capture_output=True, text=True
    )
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def environment(present: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which a process finds the stand-ins first, and SGLang accepts them."""
    path = [str(FOLDER), *filter(None, present.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }
