"""`scripts/toolkit` finds a CUDA toolkit of the machine or makes one of NVIDIA's wheels.

`scripts/setup` refuses a driver that is too old for them, and puts ninja on the PATH.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "toolkit"
NEEDED = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")


def write(folder: Path, *files: str, release: str = "13.0") -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
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


def test_a_relative_path_of_the_environment_gives_whole_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `export CUDA_HOME=$(scripts/toolkit .venv)`, which the docs say."""
    wheels(tmp_path / "venv")
    monkeypatch.chdir(tmp_path)
    assert run(Path("venv")) == (str(tmp_path / "venv" / "cuda"), "")


def test_a_complete_toolkit_of_the_machine_wins(tmp_path: Path) -> None:
    venv = wheels(tmp_path / "venv")
    installed = write(tmp_path / "installed", *NEEDED)
    assert run(venv, CUDA_HOME=str(installed)) == (str(installed), "")
    assert run(venv, path=f"{installed / 'bin'}:/usr/bin:/bin") == (str(installed), "")
    assert not (venv / "cuda").exists()


def test_a_toolkit_of_another_release_does_not_win(tmp_path: Path) -> None:
    venv = wheels(tmp_path / "venv")
    old = write(tmp_path / "old", *NEEDED, release="12.4")
    assert run(venv, path=f"{old / 'bin'}:/usr/bin:/bin") == (str(venv / "cuda"), "")
    found, error = run(venv, CUDA_HOME=str(old))
    assert not found
    assert "has release 12, but the wheels of torch need 13; unset CUDA_HOME" in error
    assert len(error.splitlines()) == 1
    assert run(tmp_path / "empty", CUDA_HOME=str(old)) == (str(old), ""), "no wheel says what fits"


def test_the_wheels_get_a_library_of_the_driver_to_link_with(tmp_path: Path) -> None:
    found, _ = run(wheels(tmp_path / "venv"))
    program = tmp_path / "linked.so"
    source = tmp_path / "empty.cpp"
    source.write_text("int none;")
    link = [
        "g++",
        "-shared",
        "-Wl,--no-as-needed",
        str(source),
        f"-L{found}/lib64/stubs",
        "-lcuda",
        "-o",
        str(program),
    ]
    subprocess.run(link, check=True, capture_output=True)
    needed = subprocess.run(["readelf", "-d", program], check=True, capture_output=True, text=True)
    assert "libcuda.so.1" in needed.stdout


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


def write_smi(folder: Path, driver: str) -> None:
    """An nvidia-smi that finds a GPU with this driver."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || echo "{driver}"\n')
    program.chmod(0o755)


@pytest.mark.parametrize("driver", ["550.54.15", ""])
def test_a_driver_that_is_too_old_ends_the_setup_before_it_installs_anything(
    tmp_path: Path, driver: str
) -> None:
    write_smi(tmp_path, driver)
    done = subprocess.run(
        ["bash", SCRIPT.with_name("setup")],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "no-such-python"},
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"setup: the NVIDIA driver is {driver or 'unknown'}, but CUDA 13 needs 580 or newer: "
        "update the driver\n"
    )


def test_the_setup_puts_the_ninja_of_the_environment_on_the_path(tmp_path: Path) -> None:
    """SGLang and FlashInfer call ninja by its name. The environment here is a stub, and current."""
    root = tmp_path / "root"
    determining = ("requirements/cuda.txt", "pyproject.toml", "setup.py")
    write(root, *determining, "python/sglang_qspec/cpu/native/module.cpp", ".venv/bin/ninja")
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (root / "scripts").symlink_to(SCRIPT.parent)
    content = (root / "setup.py").read_bytes()  # of each file
    stamp = hashlib.sha256(b"cuda\n" + 4 * content).hexdigest()
    (root / ".venv" / "stamp").write_text(f"{stamp}  -\n")
    write_smi(tmp_path / "bin", "580.65.06")
    done = subprocess.run(
        ["bash", "-c", f"source {root}/scripts/setup; command -v ninja"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
    )
    assert done.stdout.splitlines() == [str(root / ".venv" / "bin" / "ninja")], done.stderr
