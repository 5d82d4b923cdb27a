"""The compiled part; all else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

NATIVE = Path("python/sglang_qspec/trie/native")

setup(
    ext_modules=[
        Pybind11Extension(
            "sglang_qspec.trie._native",
            [str(NATIVE / "module.cpp")],
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            cxx_std=17,
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra"],
        )
    ]
)
