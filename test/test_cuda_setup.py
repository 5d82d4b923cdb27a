"""The set-up for a GPU, on a machine without one: what it installs compiles and links kernels.

A stub of nvidia-smi reports a GPU. `scripts/setup` installs requirements/cuda.txt, with downloads
that uv keeps in its cache. The PATH has neither nvcc nor ninja, so those of the wheels serve.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.repository import copy_tracked, run
from test.test_toolkit import write_smi

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]

HIDDEN = ("nvcc", "ninja", "nvidia-smi")
"""Programs that the machine may have, and a first machine with a GPU may lack."""
SAMPLING = """
from flashinfer.jit.sampling import gen_sampling_module

module = gen_sampling_module()
module.build(verbose=False)
print(module.get_library_path())
"""
"""Compiles the kernels that SGLang samples with on a GPU, and prints the library's path."""


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A copy of the repository, which the test sets up. It goes with its environment of 10 GB."""
    with tempfile.TemporaryDirectory(prefix="cuda-setup-") as folder:
        copy_tracked(Path(folder) / "root")
        yield Path(folder) / "root"


@pytest.fixture(scope="module")
def machine(root: Path) -> dict[str, str]:
    """The environment variables of a machine with a driver, and without CUDA."""
    programs = root.with_name("bin")
    write_smi(programs, "580.65.06")
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*"):
            if program.name not in HIDDEN and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    ours = ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "SGLANG_USE_CPU_ENGINE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PATH": str(programs), "PYTHON": str(Path(sys.executable).resolve())}


def test_the_wheels_compile_and_link_the_sampling_kernels_for_hopper(
    root: Path, machine: dict[str, str]
) -> None:
    assert not any(shutil.which(name, path=machine["PATH"]) for name in HIDDEN[:2])
    run("scripts/setup", cwd=root, env=machine)
    toolkit = run("scripts/toolkit", ".venv", "no-such-toolkit", cwd=root, env=machine).strip()
    assert toolkit == str(root / ".venv" / "cuda")
    (root / "sampling.py").write_text(SAMPLING)
    compiling = {
        **machine,
        "CUDA_HOME": toolkit,
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(root),
    }
    begun = "source scripts/setup; exec .venv/bin/python sampling.py"
    library = Path(run("bash", "-c", begun, cwd=root, env=compiling).splitlines()[-1])
    assert library.is_relative_to(root)
    assert "90a" in library.parts
    parts = run("readelf", "--dynamic", "--section-headers", "--wide", library, cwd=root)
    assert ".nv_fatbin" in parts
    assert "libcudart.so.13" in parts
