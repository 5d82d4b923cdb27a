"""The compiled decoder against the same layers in torch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_qspec.cpu.linear_grids import Grid, round_int8
from sglang_qspec.cpu.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX-512 with VNNI")

HIDDEN, INNER, LAYERS, SLOTS, REACH, EPS = 96, 160, 2, 64, 32, 1e-5


@dataclass
class Layer:
    """Grids of qkv, out, gate_up and down, and two norms."""

    grids: list[Grid]
    norms: list[Tensor]


class Model:
    """A random Llama without embedding and head, and a pool of KV for it."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        make = torch.Generator().manual_seed(heads)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make)

        shapes = [
            ((heads + 2 * kv_heads) * dim, HIDDEN),
            (HIDDEN, heads * dim),
            (2 * INNER, HIDDEN),
            (HIDDEN, INNER),
        ]
        self.layers = [
            Layer(
                [round_int8(random(n, k) / k**0.5).per_channel() for n, k in shapes],
                [1 + 0.1 * random(HIDDEN) for _ in range(2)],
            )
            for _ in range(LAYERS)
        ]
        self.norm = 1 + 0.1 * random(HIDDEN)
        angles = torch.arange(REACH)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        self.pools = [
            [torch.zeros(SLOTS, kv_heads, dim, dtype=dtype) for _ in range(2)]
            for _ in range(LAYERS)
        ]
        packed = native().PackedInt8
        self.decoder = native().Decoder(
            [
                (
                    *(packed(g.q.numpy(), g.scale[:, 0].contiguous().numpy()) for g in layer.grids),
                    *(norm.numpy() for norm in layer.norms),
                    *(as_numpy(pool) for pool in pools),
                )
                for layer, pools in zip(self.layers, self.pools, strict=True)
            ],
            self.norm.numpy(),
            self.cos_sin.numpy(),
            heads,
            kv_heads,
            EPS,
        )

    def reference(self, hidden: Tensor) -> Tensor:
        """What follows `hidden` [tokens, HIDDEN], all of one row, from its beginning."""
        turned = self.heads + self.kv_heads
        cos, sin = self.cos_sin[: len(hidden), None].chunk(2, -1)
        group = self.heads // self.kv_heads
        for layer in self.layers:
            qkv, out, gate_up, down = (grid.dequantize() for grid in layer.grids)
            heads = (rms(hidden, layer.norms[0]) @ qkv.T).view(len(hidden), -1, self.dim)
            first, second = heads[:, :turned].chunk(2, -1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            query, key = rotated[:, : self.heads], rotated[:, self.heads :]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                key.repeat_interleave(group, 1).transpose(0, 1),
                heads[:, turned:].repeat_interleave(group, 1).transpose(0, 1),
                is_causal=True,
            )
            hidden = hidden + mixed.transpose(0, 1).flatten(1) @ out.T
            gate, up = (rms(hidden, layer.norms[1]) @ gate_up.T).chunk(2, -1)
            hidden = hidden + (silu(gate) * up) @ down.T
        return rms(hidden, self.norm)


def rms(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * rows.square().mean(-1, keepdim=True).add(EPS).rsqrt() * weight


def as_numpy(pool: Tensor) -> np.ndarray:
    return (pool.view(torch.uint16) if pool.dtype == torch.bfloat16 else pool).numpy()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def run(model: Model, parts: list[tuple[int, int, Tensor]], table: Tensor, **more: int) -> Tensor:
    """One pass over (row, first position, tokens [.., HIDDEN]); their slots are in `table`."""
    positions = torch.cat([torch.arange(first, first + len(x)) for _, first, x in parts])
    rows = torch.cat([torch.full((len(x),), row) for row, _, x in parts])
    hidden = torch.cat([x for _, _, x in parts]).clone()
    model.decoder.forward(
        hidden.numpy(),
        positions.numpy(),
        table[rows, positions].long().numpy(),
        rows.numpy(),
        table.numpy(),
        **{"digits": 2, "threads": 1, **more},
    )
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (5, 1, 64), (2, 2, 128)])
def test_rows_of_different_lengths_go_on_as_in_torch(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    model = Model(heads, kv_heads, dim, dtype)
    long, short = torch.randn(21, HIDDEN), torch.randn(9, HIDDEN)
    table = torch.randperm(SLOTS)[: 2 * REACH].view(2, REACH).int()
    tolerance = 2e-3 if dtype == torch.float32 else 1e-2
    # Both prompts at once, then one token each, then three of the first.
    begun = run(model, [(0, 0, long[:17]), (1, 0, short[:8])], table)
    assert error(begun[16], model.reference(long)[16]) < tolerance
    assert error(begun[17:], model.reference(short)[:8]) < tolerance
    both = run(model, [(1, 8, short[8:]), (0, 17, long[17:18])], table)
    assert error(both[0], model.reference(short)[8]) < tolerance
    assert error(both[1], model.reference(long)[17]) < tolerance
    last = run(model, [(0, 18, long[18:])], table)
    assert error(last, model.reference(long)[18:]) < tolerance


def test_more_threads_and_fewer_digits_change_only_the_rounding() -> None:
    model = Model(6, 2, 64, torch.float32)
    prompt, table = torch.randn(20, HIDDEN), torch.arange(REACH).int()[None]
    alone = run(model, [(0, 0, prompt)], table)
    assert torch.equal(run(model, [(0, 0, prompt)], table, threads=3), alone)
    assert 1e-4 < error(run(model, [(0, 0, prompt)], table, digits=1), alone) < 5e-2


def test_what_does_not_fit_is_refused() -> None:
    model = Model(6, 2, 64, torch.float32)
    one, table = torch.randn(1, HIDDEN), torch.arange(REACH).int()[None]
    with pytest.raises(ValueError, match="position"):
        model.decoder.forward(
            *(one.numpy(), *(np.array([i]) for i in (REACH, 0, 0)), table.numpy()), 1, 1
        )
    with pytest.raises(ValueError, match="slot"):
        run(model, [(0, 0, one)], torch.full((1, REACH), SLOTS).int())
    with pytest.raises(ValueError, match="digits"):
        run(model, [(0, 0, one)], table, digits=3)
    with pytest.raises(ValueError, match="hidden"):
        run(model, [(0, 0, torch.randn(1, HIDDEN + 16))], table)
