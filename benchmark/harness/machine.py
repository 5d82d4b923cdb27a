"""The machine, the versions and the command of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil


def provenance() -> dict[str, Any]:
    """Command, versions and machine, for the JSON line."""
    return {"command": shlex.join(sys.orig_argv), "machine": machine(), "versions": versions()}


def machine() -> str:
    """Processor, cores, memory and GPUs, in one line."""
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        *of_gpus("name"),
    ]
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    packages = ("sglang-qspec", "sglang", "torch", "transformers")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **found}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def of_gpus(field: str) -> list[str]:
    """A field of nvidia-smi for each GPU, without its unit; empty if there is no answer."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return listing.stdout.splitlines()
