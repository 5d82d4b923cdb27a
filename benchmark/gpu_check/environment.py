"""Records the environment for the report, and checks what every other part needs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmark.gpu_check.findings import NotHereError, Options, Steps
from benchmark.harness import standin
from benchmark.harness.report import Table
from sglang_qspec.tools.doctor.devices import missing_ninja, old_driver

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python", "triton", "apache-tvm-ffi")
QUERY = "index,name,driver_version,memory.total,compute_cap"


def environment(options: Options, steps: Steps) -> None:
    """Record GPU, driver, versions and CUDA toolkit; fail if one of them is missing."""
    import torch

    import sglang_qspec

    facts: dict[str, Any] = steps.found.figures
    facts["qspec"] = sglang_qspec.__version__
    facts["python"] = sys.version.split()[0]
    facts["torch"] = str(torch.__version__)
    facts["torch_cuda"] = torch.version.cuda
    facts |= {name: _version(name) for name in PACKAGES}
    with steps.check("gpu"):
        _needs_gpu(options)
        listing = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        facts["gpus"] = _output(listing).splitlines()
        assert (too_old := old_driver()) is None, too_old
        assert torch.cuda.is_available(), "torch finds no GPU that it can use"
        values = torch.arange(5.0, device="cuda")
        assert values.sum().item() == 10.0
    with steps.check("toolkit"):
        _needs_gpu(options)
        # The same toolkit as `scripts/setup` exports.
        facts["cuda_home"] = _output([str(ROOT / "scripts" / "toolkit"), sys.prefix])
        compiler = str(Path(facts["cuda_home"]) / "bin" / "nvcc")
        facts["nvcc"] = _output([compiler, "--version"]).splitlines()[-1]
        assert (missing := missing_ninja()) is None, missing
    with steps.check("sgl_kernel"):
        _needs_gpu(options)
        error = standin.import_error()
        facts["sgl_kernel"] = error or "loads"
        if error is not None:
            raise NotHereError(f"sgl_kernel does not load, so stand-ins replace it: {error}")
    rows = [(name, str(value)) for name, value in facts.items()]
    steps.found.tables.append(Table("Environment", ("", ""), rows))


def _needs_gpu(options: Options) -> None:
    if not options.on_gpu:
        raise NotHereError("no GPU takes part")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    """The output of a command. Raises RuntimeError with the command's error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout.strip()
