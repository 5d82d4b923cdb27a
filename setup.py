"""The compiled extensions; pyproject.toml has the rest of the package's metadata."""

import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

PACKAGE = Path("python/sglang_qspec")


def extension(part: str, *arguments: str, link: tuple[str, ...] = ()) -> Pybind11Extension:
    """Return the extension `sglang_qspec.PART._native`, built from the folder `PART/native`."""
    sources = PACKAGE / part / "native"
    return Pybind11Extension(
        f"sglang_qspec.{part}._native",
        [str(sources / "module.cpp")],
        depends=sorted(map(str, sources.glob("*.h"))),
        cxx_std=17,
        extra_compile_args=["-g0", "-Wall", "-Wextra", *arguments],
        extra_link_args=list(link),
    )


extensions = [extension("trie", "-O2")]
if platform.machine() == "x86_64":
    # `cpu/native.py` imports this only if the processor has these instructions.
    vectors = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
    # GCC 12 gives these warnings for its own intrinsics.
    quiet = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    extensions.append(
        extension("cpu", "-O3", "-mfma", *vectors, *quiet, "-fopenmp", link=("-fopenmp",))
    )

setup(ext_modules=extensions)
