"""SGLang can import the stand-in kernels, which are installed only where they are needed."""

import os
import subprocess
import sys

import pytest

_IMPORT = """
import sys
from sglang_qspec.cpu.install import install_kernels
print(install_kernels(), install_kernels(), "torch" in sys.modules)
import sgl_kernel, sgl_kernel.speculative, torch
print(sgl_kernel.__file__)
print(hasattr(torch.ops.sgl_kernel, "convert_weight_packed"))
seed = torch.tensor([1, 2], dtype=torch.uint64)
print(torch.ops.sgl_kernel.murmur_hash32_cpu(seed, torch.zeros(2).long(), torch.arange(3)).dtype)
try:
    from sgl_kernel import rmsnorm
except ImportError as error:
    print("ImportError")
try:
    sgl_kernel.rmsnorm
except AttributeError as error:
    print(error)
"""


def _run(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def needs_standin() -> None:
    from sglang_qspec.cpu.install import _cpu_build_loads

    if _cpu_build_loads():
        pytest.skip("this machine has SGLang's own CPU kernels")


@pytest.mark.usefixtures("needs_standin")
def test_a_cpu_server_imports_the_stand_in_and_an_unknown_symbol_is_a_clear_error() -> None:
    lines = _run(_IMPORT, SGLANG_USE_CPU_ENGINE="1")
    assert lines[0] == "True True False"
    assert lines[1].endswith("standin/sgl_kernel/__init__.py")
    assert lines[2] == "False"
    assert lines[3] == "torch.uint32"
    assert lines[4] == "ImportError"
    assert "sgl_kernel.rmsnorm has no stand-in" in lines[5]


def test_nothing_is_installed_where_sglang_does_not_run_on_the_cpu() -> None:
    code = (
        "import sys; from sglang_qspec.cpu.install import install_kernels;"
        "print(install_kernels(), any('standin' in p for p in sys.path))"
    )
    assert _run(code, SGLANG_USE_CPU_ENGINE="0") == ["False False"]
