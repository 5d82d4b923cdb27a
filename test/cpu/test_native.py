"""The compiled decoder, compared with the same layers in torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from sglang_qspec.cpu.linear_grids import Grid, round_int8
from sglang_qspec.cpu.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX2")

HIDDEN, INNER, LAYERS, SLOTS, REACH, EPS = 96, 160, 2, 64, 32, 1e-5


@dataclass
class Layer:
    """Weight grids of qkv, out, gate_up and down, and two norms."""

    grids: list[Grid]
    norms: list[Tensor]


class Model:
    """A random Llama without embedding and head, and its KV pool."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        inner: tuple[int, ...] = (INNER,) * LAYERS,
    ) -> None:
        make = torch.Generator().manual_seed(heads)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make)

        def layer(inner: int) -> Layer:
            shapes = [
                ((heads + 2 * kv_heads) * dim, HIDDEN),
                (HIDDEN, heads * dim),
                (2 * inner, HIDDEN),
                (HIDDEN, inner),
            ]
            grids = [round_int8(random(n, k) / k**0.5).per_channel() for n, k in shapes]
            return Layer(grids, [1 + 0.1 * random(HIDDEN) for _ in range(2)])

        self.layers = [layer(width) for width in inner]
        self.norm = 1 + 0.1 * random(HIDDEN)
        angles = torch.arange(REACH)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        self.pools = [
            [torch.zeros(SLOTS, kv_heads, dim, dtype=dtype) for _ in range(2)] for _ in self.layers
        ]
        packed = native().PackedInt8
        self.native_layers = [
            (
                *(packed(g.q.numpy(), g.scale[:, 0].contiguous().numpy()) for g in layer.grids),
                *(norm.numpy() for norm in layer.norms),
                *(as_numpy(pool) for pool in pools),
            )
            for layer, pools in zip(self.layers, self.pools, strict=True)
        ]
        self.decoder = self.make()

    def make(self, **changed: Any) -> Any:
        """A decoder of these layers; `changed` replaces arguments."""
        arguments = {
            "layers": self.native_layers,
            "final_norm": self.norm.numpy(),
            "cos_sin": self.cos_sin.numpy(),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "eps": EPS,
        }
        return native().Decoder(**{**arguments, **changed})

    def reference(self, hidden: Tensor) -> Tensor:
        """The output in torch for `hidden` [tokens, HIDDEN], one row from its first position."""
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
def test_rows_of_different_lengths_continue_as_in_torch(
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
    coarse = error(run(model, [(0, 0, prompt)], table, digits=1), alone)
    assert 0 < coarse < (5e-2 if native().EXACT_DIGITS == 2 else 1e-3)


@pytest.mark.parametrize("inner", [(32, 480, 96), (480, 32), (160, 176)])
def test_layers_of_unequal_inner_widths_continue_as_in_torch(inner: tuple[int, ...]) -> None:
    model = Model(6, 2, 64, torch.float32, inner)
    prompt, table = torch.randn(24, HIDDEN), torch.arange(REACH).int()[None]
    assert error(run(model, [(0, 0, prompt)], table), model.reference(prompt)) < 2e-3


def test_rows_are_multiplied_when_their_number_squared_exceeds_32_bits() -> None:
    """Dividing rows among threads squares their number, and 93,000 squared exceeds 2**31."""
    weight = native().PackedInt8(np.ones((1, 1), np.int8), np.ones(1, np.float32))
    x = np.arange(93_000, dtype=np.float32)[:, None]
    assert np.array_equal(weight.multiply(x, 1, 1), x)


def replaced(layers: list[Any], part: int, value: object) -> list[Any]:
    """The layers, with one part of the last layer replaced."""
    *others, last = layers
    return [*others, (*last[:part], value, *last[part + 1 :])]


def test_a_layer_of_the_wrong_shape_is_refused_by_name() -> None:
    model = Model(6, 2, 64, torch.float32)
    layers = model.native_layers
    down = layers[0][3]
    pool = np.zeros((SLOTS, 2, 64), np.float32)
    frozen = pool.copy()
    frozen.flags.writeable = False
    for part, value, message in (
        (0, None, r"layers\[1\]: qkv must be a PackedInt8"),
        (2, down, r"layers\[1\]: gate_up is \[96, 160\], but must be \[320, 96\]"),
        (4, np.ones(HIDDEN + 1, np.float32), r"layers\[1\]: the norm before attention"),
        (5, np.ones(HIDDEN), r"layers\[1\]: the norm before the MLP must be a float32"),
        (6, pool[:-1].copy(), r"layers\[1\]: keys has the shape \[63, 2, 64\]"),
        (7, pool.astype(np.uint16), r"layers\[1\]: values must be .* of one type in all layers"),
        (7, frozen, r"layers\[1\]: values must be writeable"),
    ):
        with pytest.raises(ValueError, match=message):
            model.make(layers=replaced(layers, part, value))
    with pytest.raises(ValueError, match=r"layers\[1\] must be a tuple"):
        model.make(layers=[layers[0], layers[1][:7]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": []}, r"len\(layers\) is 0"),
        ({"heads": 1 << 30}, "heads is 1073741824"),
        ({"heads": 0}, "heads is 0"),
        ({"kv_heads": -2}, "kv_heads|keys"),
        ({"kv_heads": 4}, "kv_heads|keys"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"final_norm": np.ones(0, np.float32)}, "final_norm"),
        ({"final_norm": np.ones(40, np.float32)}, "norm"),
        ({"cos_sin": np.ones((REACH, 96), np.float32)}, "cos_sin|keys"),
        ({"cos_sin": np.ones((0, 64), np.float32)}, "cos_sin"),
    ],
)
def test_a_decoder_with_impossible_sizes_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model(6, 2, 64, torch.float32).make(**changed)


def test_a_decoder_keeps_its_layers_when_the_caller_drops_them() -> None:
    model = Model(6, 2, 64, torch.float32)
    prompt, table = torch.randn(5, HIDDEN), torch.arange(REACH).int()[None]
    before = run(model, [(0, 0, prompt)], table)
    model.native_layers.clear()
    model.pools.clear()
    assert torch.equal(run(model, [(0, 0, prompt)], table), before)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 4), r"q.shape\[0\]"),
        ((4, 0), r"q.shape\[1\]"),
        ((1, 70_000), "is 70000, but must be from 1 to 65793"),
    ],
)
def test_a_weight_with_sums_beyond_32_bits_is_refused(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native().PackedInt8(np.ones(shape, np.int8), np.ones(shape[0], np.float32))


def test_the_widest_allowed_weight_is_summed_exactly() -> None:
    """The largest inputs times the smallest weights come closest to the 32-bit limit."""
    inputs = 65_793
    weight = native().PackedInt8(np.full((1, inputs), -128, np.int8), np.ones(1, np.float32))
    x = np.full((1, inputs), 255, np.float32)
    x[0, 0] = 0
    expected = -128 * x.sum(dtype=np.float64)
    for digits in (1, 2):
        assert weight.multiply(x, digits, 1)[0, 0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("threads", [0, -1, 1 << 20])
def test_an_impossible_number_of_threads_is_refused(threads: int) -> None:
    weight = native().PackedInt8(np.ones((4, 4), np.int8), np.ones(4, np.float32))
    with pytest.raises(ValueError, match=f"threads is {threads}, but must be from 1 to"):
        weight.multiply(np.ones((1, 4), np.float32), 1, threads)


@pytest.mark.parametrize("slot", [-1, SLOTS, 1 << 30])
def test_a_table_with_slots_outside_the_pool_is_refused(slot: int) -> None:
    """Attention reads the slots of all earlier positions, not only the slot of the new token."""
    model = Model(6, 2, 64, torch.float32)
    table = torch.arange(REACH).int()[None]
    table[0, 3] = slot
    with pytest.raises(ValueError, match=rf"table\[0\]\[3\] is {slot}, but must be from 0 to 63"):
        run(model, [(0, 6, torch.randn(2, HIDDEN))], table)
    run(model, [(0, 0, torch.randn(2, HIDDEN))], table)


def test_mismatched_shapes_are_refused() -> None:
    model = Model(6, 2, 64, torch.float32)
    one, table = torch.randn(1, HIDDEN), torch.arange(REACH).int()[None]
    with pytest.raises(ValueError, match="position"):
        model.decoder.forward(
            *(one.numpy(), *(np.array([i]) for i in (REACH, 0, 0)), table.numpy()), 1, 1
        )
    with pytest.raises(ValueError, match="slots|table"):
        run(model, [(0, 0, one)], torch.full((1, REACH), SLOTS).int())
    with pytest.raises(ValueError, match="digits"):
        run(model, [(0, 0, one)], table, digits=3)
    with pytest.raises(ValueError, match="hidden"):
        run(model, [(0, 0, torch.randn(1, HIDDEN + 16))], table)


@pytest.mark.skipif(native() is None or not native().may_use_tiles(), reason="no AMX")
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 50])
def test_a_product_has_the_same_bits_with_amx_and_with_vnni(rows: int, digits: int) -> None:
    """Only a number of inputs that is a multiple of 64 uses AMX; further zeros change no sum."""
    random = np.random.default_rng(rows)
    q = random.integers(-127, 128, (100, 192), dtype=np.int8)
    scale = random.random(100, dtype=np.float32)
    x = random.standard_normal((rows, 192), dtype=np.float32)
    wider = native().PackedInt8(np.pad(q, ((0, 0), (0, 4))), scale)
    expected = wider.multiply(np.pad(x, ((0, 0), (0, 4))), digits, 1)
    for threads in (1, 2):
        found = native().PackedInt8(q, scale).multiply(x, digits, threads)
        assert np.array_equal(found, expected)
