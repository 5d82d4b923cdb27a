"""What a measurement ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import psutil


def machine() -> str:
    """Processor, cores, memory and GPUs, in a line."""
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        *_gpus(),
    ]
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Of Python and the packages that a figure depends on."""
    packages = ("sglang-qspec", "sglang", "torch", "transformers")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **found}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return listing.stdout.split("\n")[:-1] if listing.returncode == 0 else []
