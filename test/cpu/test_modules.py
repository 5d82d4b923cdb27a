"""Which compiled module runs on a processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_qspec.cpu.native import native

FOLDER = Path(__file__).parent
NAMED = "from sglang_qspec.cpu.native import native; print(getattr(native(), '__name__', None))"


def run(capability: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(native() is None, reason="no AVX2")
@pytest.mark.parametrize(
    ("capability", "name"), [("avx2", "sglang_qspec.cpu._native_avx2"), ("default", "None")]
)
def test_torchs_limit_of_the_instructions_holds_for_the_module(capability: str, name: str) -> None:
    assert run(capability, "-c", NAMED).stdout.strip() == name


@pytest.mark.skipif(
    native() is None or native().__name__.endswith("_avx2"), reason="the other tests run AVX2's"
)
def test_the_module_for_avx2_passes_the_tests_of_the_other_one() -> None:
    files = ("test_native.py", "test_fuzz.py", "test_row_ops.py", "test_row_attention.py")
    options = ["-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = run("avx2", *options, *(str(FOLDER / file) for file in files))
    assert result.returncode == 0, result.stdout
