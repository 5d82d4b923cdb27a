"""Checks of the target's device, its memory, and the CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from sglang_qspec import config
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, failure, ok, warning

TOOLKIT = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")
"""Files of a CUDA toolkit that SGLang's compiler needs; the same as in scripts/toolkit."""
OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest NVIDIA driver for each CUDA release; 580 also in scripts/setup."""


def device(case: Case) -> Finding:
    """Which device the target runs on. On a CPU, this prepares the process for SGLang."""
    import torch

    case.cpu_engine = config.cpu_engine()
    has_gpu = torch.cuda.is_available()
    asked = case.device.partition(":")[0]
    kind = asked or ("cpu" if case.cpu_engine or not has_gpu else "cuda")
    if kind == "cuda":
        return _gpus(case)
    case.kind = "cpu"
    config.use_cpu_engine()
    return _cpu(case, unused_gpu=not has_gpu and _has_driver())


def _cpu(case: Case, *, unused_gpu: bool) -> Finding:
    import psutil
    import torch

    from sglang_qspec.sidecar.memory import gib

    memory = psutil.virtual_memory()
    features = torch.backends.cpu.get_cpu_capability()
    found = (
        f"the CPU ({features}) with {gib(memory.total)} of memory, {gib(memory.available)} of it "
        "available"
    )
    if unused_gpu:
        return warning(
            f"{found}; there is an NVIDIA driver, but torch ({torch.__version__}) finds no GPU",
            old_driver() or "To use the GPU, install the CUDA build of torch and check nvidia-smi.",
        )
    if not case.cpu_engine:
        return warning(
            f"{found}; {config.CPU_ENGINE} is not set, and SGLang needs it to start on a CPU",
            f"Set {config.CPU_ENGINE}=1 when you start the server.",
        )
    if features not in ("AVX2", "AVX512"):
        return warning(f"{found}; without AVX2 a CPU decodes slowly")
    return ok(found)


def _gpus(case: Case) -> Finding:
    import torch

    from sglang_qspec.engine.placement import devices as placement
    from sglang_qspec.sidecar.memory import gib

    if (too_old := old_driver()) is not None:
        return failure(too_old, "Update the driver, or give --device cpu.")
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else ", which is a build without CUDA"
        return failure(
            f"torch {torch.__version__}{build} finds no GPU that it can use",
            "Check nvidia-smi and CUDA_VISIBLE_DEVICES, and install the CUDA build of torch; or "
            "give --device cpu.",
        )
    if config.cpu_engine():
        return failure(
            f"--device is {case.device}, but {config.CPU_ENGINE}=1 lets SGLang run on the CPU",
            f"Unset {config.CPU_ENGINE}.",
        )
    count = torch.cuda.device_count()
    if case.index >= count:
        return failure(
            f"--device is {case.device}, but this process sees {count} GPUs",
            f"Give a number below {count}, or set CUDA_VISIBLE_DEVICES.",
        )
    case.kind = "cuda"
    gpus = placement.visible_gpus()
    names = [
        f"cuda:{number} {torch.cuda.get_device_name(number)}"
        + "".join(f", {gib(gpu.free)} of {gib(gpu.total)} free" for gpu in gpus[number:][:1])
        for number in range(count)
    ]
    found = "; ".join(names)
    if not gpus:
        return warning(f"{found}; NVML does not tell their memory", "Install nvidia-ml-py.")
    target = gpus[case.index]
    if target.used > placement.UNUSED * target.total:
        return warning(
            f"{found}; other processes use {gib(target.used)} of cuda:{case.index}, the target's",
            "End them, or choose another GPU with --device cuda:N.",
        )
    return ok(found)


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def old_driver() -> str | None:
    """What to say of an NVIDIA driver that is too old for torch's CUDA; None if it is not so."""
    import torch

    needed = OLDEST_DRIVERS.get(_major(torch.version.cuda))
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = found.partition("\n")[0].strip()
    if needed is None or not 0 < _major(driver) < needed:
        return None
    return (
        f"the NVIDIA driver is {driver}, but torch {torch.__version__} has CUDA "
        f"{torch.version.cuda}, which needs {needed} or newer"
    )


def _major(version: str | None) -> int:
    """The first number of a version; 0 if there is none."""
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _output(*command: str) -> str:
    """What the command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def missing_ninja() -> str | None:
    """What to say if there is no ninja, which SGLang and FlashInfer call to compile kernels."""
    if shutil.which("ninja"):
        return None
    return "ninja, which SGLang compiles kernels with, is not on the PATH"


def toolkit(case: Case) -> Finding:
    """Whether SGLang finds what it compiles kernels with while it runs."""
    if (missing := missing_ninja()) is not None:
        beside = Path(sys.executable).parent
        return failure(missing, f"Activate the virtual environment: export PATH={beside}:$PATH")
    import torch

    from sglang_qspec.engine.start import preflight

    return toolkit_in(Path(preflight.toolkit()), torch.version.cuda)


def toolkit_in(home: Path, needed: str | None = None) -> Finding:
    """Whether the folder `home` holds a CUDA toolkit of the release `needed`, such as 13.0."""
    missing = [name for name in TOOLKIT if not (home / name).exists()]
    if missing:
        return failure(
            f"SGLang looks for the CUDA toolkit in {home}, which has no {missing[0]}",
            "Install a toolkit, or set CUDA_HOME; in a clone: "
            "export CUDA_HOME=$(scripts/toolkit .venv)",
        )
    release = _output(str(home / "bin" / "nvcc"), "--version").partition("release ")[2]
    release = release.partition(",")[0]
    if _major(needed) and _major(release) and _major(release) != _major(needed):
        return failure(
            f"the CUDA toolkit in {home} has release {release}, but torch has CUDA {needed}",
            f"Install a toolkit of CUDA {_major(needed)}, or set CUDA_HOME; in a clone: "
            "export CUDA_HOME=$(scripts/toolkit .venv)",
        )
    return ok(f"CUDA toolkit in {home}" + (f", release {release}" if release else ""))
