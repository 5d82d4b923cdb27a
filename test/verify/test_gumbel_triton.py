"""The Triton kernels draw what the CPU draws, in Triton's interpreter, and compile for GPUs.

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

generator = torch.Generator().manual_seed(3)
columns = 300  # of 3 parts with 2 blocks of 64; the last block is empty
logits = torch.randn(12, columns, generator=generator)
weights = torch.softmax(logits * torch.tensor([0.0, 0.5, 3.0, 30.0]).repeat(3)[:, None], -1)
weights[::5, 40:] = 0.0
seeds = torch.randint(-(2**63), 2**63 - 1, (12,), generator=generator)
positions = torch.arange(12) * 7
guesses = likeliest(weights)
drawn = gumbel_triton.search(weights, seeds, positions, guesses, block=64, part=2)
assert drawn.tolist() == gumbel_argmax(weights, seeds, positions).tolist(), drawn
assert len(set(drawn.tolist())) > 6
assert (drawn != guesses).sum() > 2

broken = torch.full((1, columns), torch.nan)
drawn = gumbel_triton.search(
    broken, seeds[:1], positions[:1], torch.tensor([5]), block=64, part=2
)
assert drawn.tolist() == [5]
none = weights[:0], seeds[:0], positions[:0], guesses[:0]
assert gumbel_triton.search(*none).shape == (0,)
"""

FILTERED = """
import torch
from sglang_qspec.verify import gumbel_triton
from sglang_qspec.verify.gumbel_argmax import Ranking, gumbel_argmax_kept

generator = torch.Generator().manual_seed(3)
rows, columns = 60, 300
scale = torch.tensor([0.2, 1.5]).repeat(30)[:, None]
weights = torch.softmax(torch.randn(rows, columns, generator=generator) * scale, -1)
seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
positions = torch.arange(rows)
top_ks = torch.tensor([columns, 90, 1 << 30, 64, 1]).repeat(12)  # of one block, or of two
top_ps = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.4, 1.0]).repeat(10)
min_ps = torch.tensor([0.0, 0.0, 0.7, 0.0]).repeat(15)
ranked, tokens = weights.sort(-1, descending=True)
for ranks in (columns, 280):  # rows without a filter do not need all ranks
    ranking = Ranking(ranked[:, :ranks], tokens[:, :ranks], top_ks, top_ps, min_ps)
    drawn = gumbel_triton.search_kept(weights, *ranking, seeds, positions, block=64, part=2)
    expected = gumbel_argmax_kept(weights, ranking, seeds, positions)
    assert drawn.tolist() == expected.tolist(), (ranks, drawn, expected)
    assert len(set(drawn.tolist())) > 30

broken = torch.full((1, columns), torch.nan)
ranking = Ranking(broken, tokens[:1], top_ks[1:2], top_ps[:1], min_ps[:1])
drawn = gumbel_triton.search_kept(broken, *ranking, seeds[:1], positions[:1], block=64, part=2)
assert drawn.tolist() == tokens[:1, 0].tolist()
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sglang_qspec.verify import gumbel_triton

types = {
    "weights": "*fp32", "ranked": "*fp32", "tokens": "*i64", "top_ks": "*i32", "top_ps": "*fp32",
    "min_ps": "*fp32", "seeds": "*i64", "positions": "*i64", "guesses": "*i64", "values": "*fp64",
    "found": "*i64", "columns": "i32", "ranks": "i32", "block": "constexpr", "part": "constexpr",
}
sizes = {"block": gumbel_triton.BLOCK, "part": gumbel_triton.PART}
for function in (gumbel_triton._search, gumbel_triton._search_kept):
    signature = {name: types[name] for name in function.arg_names}
    for capability in (80, 89, 90, 100):
        source = ASTSource(fn=function, signature=signature, constexprs=sizes)
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


@pytest.mark.parametrize("program", [COMPARED, FILTERED], ids=["all", "filtered"])
def test_the_kernels_draw_what_the_cpu_draws(tmp_path: Path, program: str) -> None:
    run(program, tmp_path, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_every_generation_of_gpus(tmp_path: Path) -> None:
    run(COMPILED, tmp_path)
