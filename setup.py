"""The compiled parts; all else about the package is in pyproject.toml."""

import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

PACKAGE = Path("python/sglang_qspec")


def extension(part: str, *arguments: str, link: tuple[str, ...] = ()) -> Pybind11Extension:
    """`sglang_qspec.PART._native`, from the sources in its folder `native`."""
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
    # `cpu.native` asks the processor before it imports this.
    vectors = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
    # GCC 12 warns of its own intrinsics.
    quiet = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    extensions.append(
        extension("cpu", "-O3", "-mfma", *vectors, *quiet, "-fopenmp", link=("-fopenmp",))
    )

setup(ext_modules=extensions)
