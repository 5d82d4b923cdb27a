"""`scripts/toolkit` finds a CUDA toolkit of the machine or makes one of NVIDIA's wheels."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "toolkit"
NEEDED = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")


def write(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return folder


def run(venv: Path, path: str = "/usr/bin:/bin", **environment: str) -> tuple[str, str]:
    """What the script prints and its error, for the environment in `venv`."""
    done = subprocess.run(
        [SCRIPT, venv, venv / "no-such-toolkit"],
        capture_output=True,
        text=True,
        env={"PATH": path, **environment},
    )
    assert (done.returncode == 0) is (not done.stderr)
    return done.stdout.strip(), done.stderr.strip()


def wheels(folder: Path, *missing: str) -> Path:
    """A virtual environment with the parts of a toolkit as NVIDIA's wheels install them."""
    files = {"bin/nvcc", "include/cuda_runtime.h", "lib/libcudart.so.13", "nvvm/bin/cicc"}
    packages = folder / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    write(packages, *(files - set(missing)))
    return folder


def test_the_wheels_of_the_environment_become_a_toolkit(tmp_path: Path) -> None:
    venv = wheels(tmp_path / "venv")
    for _ in range(2):  # the second run finds the links
        assert run(venv) == (str(venv / "cuda"), "")
    for file in NEEDED:
        assert (venv / "cuda" / file).is_file()
    assert (venv / "cuda" / "nvvm" / "bin" / "cicc").is_file()


def test_a_complete_toolkit_of_the_machine_wins(tmp_path: Path) -> None:
    venv = wheels(tmp_path / "venv")
    installed = write(tmp_path / "installed", *NEEDED)
    assert run(venv, CUDA_HOME=str(installed)) == (str(installed), "")
    assert run(venv, path=f"{installed / 'bin'}:/usr/bin:/bin") == (str(installed), "")
    assert not (venv / "cuda").exists()


def test_a_given_toolkit_that_is_incomplete_is_named_with_the_missing_file(tmp_path: Path) -> None:
    given = write(tmp_path / "given", "bin/nvcc")
    found, error = run(wheels(tmp_path / "venv"), CUDA_HOME=str(given))
    assert not found
    assert error.startswith(f"the CUDA toolkit in CUDA_HOME has no {given}/include/cuda_runtime.h")
    assert len(error.splitlines()) == 1


def test_without_any_toolkit_one_line_says_what_is_missing(tmp_path: Path) -> None:
    _, error = run(wheels(tmp_path / "venv", "bin/nvcc"))
    assert error.endswith("have no " + str(tmp_path / "venv/cuda/bin/nvcc"))
    _, error = run(tmp_path / "empty")
    assert error.startswith("no CUDA toolkit (nvcc, headers, libcudart)")
    assert len(error.splitlines()) == 1
