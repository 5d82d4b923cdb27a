"""The compiled extensions; pyproject.toml has the rest of the package's metadata."""

import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

PACKAGE = Path("python/sglang_qspec")


def extension(
    part: str, *arguments: str, source: str = "module", name: str = "_native"
) -> Pybind11Extension:
    """Return the extension `sglang_qspec.PART.NAME`, built from a source in `PART/native`."""
    sources = PACKAGE / part / "native"
    return Pybind11Extension(
        f"sglang_qspec.{part}.{name}",
        [str(sources / f"{source}.cpp")],
        depends=sorted(map(str, sources.glob("*.*"))),
        cxx_std=17,
        extra_compile_args=["-g0", "-Wall", "-Wextra", *arguments],
        extra_link_args=[argument for argument in arguments if argument == "-fopenmp"],
    )


extensions = [extension("trie", "-O2")]
if platform.machine() == "x86_64":
    # A row's result must not depend on which products the compiler fuses. GCC 12 gives the two
    # warnings for its own intrinsics.
    both = ["-O3", "-mfma", "-ffp-contract=off", "-fopenmp"]
    both += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    avx512 = [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
    # `cpu/native.py` imports the one that the processor can run.
    extensions += [
        extension("cpu", *both, *avx512),
        extension("cpu", *both, "-mavx2", source="avx2", name="_native_avx2"),
    ]

setup(ext_modules=extensions, options={"build_ext": {"parallel": True}})
