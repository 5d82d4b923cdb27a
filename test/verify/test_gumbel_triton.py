"""The Triton kernel draws what the CPU draws, in Triton's interpreter, and compiles for GPUs.

Triton reads `TRITON_INTERPRET` when it is imported, so each test has its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed; SGLang requires it on Linux"
)

COMPARED = """
import torch
from sglang_qspec.verify import gumbel_triton
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.seeded import hash_state

generator = torch.Generator().manual_seed(3)
columns = 300  # of 3 parts with 2 blocks of 64; the last block is empty
logits = torch.randn(12, columns, generator=generator)
weights = torch.softmax(logits * torch.tensor([0.0, 0.5, 3.0, 30.0]).repeat(3)[:, None], -1)
weights[::5, 40:] = 0.0
seeds = torch.randint(-(2**63), 2**63 - 1, (12,), generator=generator)
positions = torch.arange(12) * 7
states, guesses = hash_state(seeds, positions), likeliest(weights)
drawn = gumbel_triton.search(weights, states, guesses, block=64, part=2)
assert drawn.tolist() == gumbel_argmax(weights, seeds, positions).tolist(), drawn
assert len(set(drawn.tolist())) > 6
assert (drawn != guesses).sum() > 2

broken = torch.full((1, columns), torch.nan)
drawn = gumbel_triton.search(broken, states[:1], torch.tensor([5]), block=64, part=2)
assert drawn.tolist() == [5]
assert gumbel_triton.search(weights[:0], states[:0], guesses[:0]).shape == (0,)
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sglang_qspec.verify import gumbel_triton

types = {
    "weights": "*fp32", "states": "*i64", "guesses": "*i64", "values": "*fp64", "found": "*i64",
    "columns": "i32", "block": "constexpr", "part": "constexpr",
}
sizes = {"block": gumbel_triton.BLOCK, "part": gumbel_triton.PART}
for capability in (80, 89, 90, 100):
    source = ASTSource(fn=gumbel_triton._search, signature=types, constexprs=sizes)
    kernel = compile(source, target=GPUTarget("cuda", capability, 32))
    assert kernel.asm["cubin"], capability
"""


def run(program: str, cache: Path, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={
            **inherited,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TRITON_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_kernel_draws_what_the_cpu_draws(tmp_path: Path) -> None:
    run(COMPARED, tmp_path, TRITON_INTERPRET="1")


def test_the_kernel_compiles_for_every_generation_of_gpus(tmp_path: Path) -> None:
    run(COMPILED, tmp_path)
