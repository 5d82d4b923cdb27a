"""Products with packed weights, and with bfloat16 weights as they are, equal torch's."""

import pytest
import torch
from torch import Tensor

from sglang_qspec.cpu.dense_linear import (
    MOST_FLOAT_ROWS,
    can_pack,
    pack,
    packed_linear,
    takes_unpacked,
    unpacked_linear,
)
from sglang_qspec.cpu.native import native

TYPES = [
    dtype
    for dtype in (torch.bfloat16, torch.float32)
    if takes_unpacked(torch.zeros(16, 32, dtype=dtype))
]
"""The types of weights that are multiplied as they are on this processor."""
needs_product = pytest.mark.skipif(not TYPES, reason="oneDNN multiplies all types")
needs_tiles = pytest.mark.skipif(
    native() is None or not native().may_use_tiles(), reason="no AMX with bfloat16"
)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (2, 3, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_weight_gives_the_same_product(shape: tuple[int, ...], bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(40, 24, generator=random), torch.randn(shape, generator=random)
    if not can_pack(weight):
        pytest.skip("torch was built without oneDNN")
    offset = torch.randn(40, generator=random) if bias else None
    product = packed_linear(rows, pack(weight), offset)
    torch.testing.assert_close(product, torch.nn.functional.linear(rows, weight, offset))


def test_weights_that_are_not_float_matrices_are_left_unpacked() -> None:
    assert not can_pack(torch.zeros(3))
    assert not can_pack(torch.zeros(3, 3, dtype=torch.int8))
    assert not can_pack(torch.zeros(0, 3))


@needs_product
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 33, 64, 150])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 704), (2080, 96), (80, 14336)])
def test_a_product_with_a_weight_as_it_is_is_rounded_once(
    rows: int, outputs: int, inputs: int, threads: int, dtype: torch.dtype
) -> None:
    shapes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, weight, bias, addend = (numbers(*shape, dtype=dtype) for shape in shapes)
    expected = x.double() @ weight.double().T
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain = unpacked_linear(x, weight)
        whole = unpacked_linear(x, weight, bias, addend)
    finally:
        torch.set_num_threads(before)
    # A sum of float32 is off by little beside the largest sums, and bfloat16 then has 8 bits of it.
    room = 2e-5 * expected.abs().max().item()
    step = 2**-8 if dtype == torch.bfloat16 else 2**-20
    torch.testing.assert_close(plain.double(), expected, rtol=step, atol=room)
    expected = expected + bias.double() + addend.double()
    torch.testing.assert_close(whole.double(), expected, rtol=step, atol=room)


@needs_product
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [64, 704, 14336])
def test_the_product_of_a_row_does_not_depend_on_the_other_rows(
    inputs: int, dtype: torch.dtype
) -> None:
    # torch multiplies more rows of float32.
    rows = 600 if dtype == torch.bfloat16 else MOST_FLOAT_ROWS
    x, weight = numbers(rows, inputs, dtype=dtype), numbers(112, inputs, dtype=dtype)
    together = unpacked_linear(x, weight)
    for first, last in ((0, 1), (7, 9), (13, 16), (30, 64), (rows - 1, rows), (rows // 6, rows)):
        assert torch.equal(unpacked_linear(x[first:last], weight), together[first:last])


@needs_tiles
def test_tiled_products_and_those_of_onednn_take_turns_in_a_thread() -> None:
    """Both set the layout of the tile registers."""
    x, weight, packed = numbers(40, 64), numbers(48, 64), pack(numbers(48, 64))
    first = unpacked_linear(x, weight), packed_linear(x, packed)
    for _ in range(3):
        assert torch.equal(packed_linear(x, packed), first[1])
        assert torch.equal(unpacked_linear(x, weight), first[0])


@needs_product
@pytest.mark.parametrize("dtype", TYPES)
def test_such_a_product_takes_rows_of_any_shape_and_none(dtype: torch.dtype) -> None:
    x, weight = numbers(2, 3, 64, dtype=dtype), numbers(16, 64, dtype=dtype)
    assert torch.equal(
        unpacked_linear(x, weight).view(6, 16), unpacked_linear(x.view(6, 64), weight)
    )
    turned = x.transpose(0, 1)
    assert torch.equal(unpacked_linear(turned, weight), unpacked_linear(x, weight).transpose(0, 1))
    assert unpacked_linear(x[:0], weight).shape == (0, 3, 16)


def test_no_such_product_for_other_weights() -> None:
    for weight in (
        torch.zeros(16, 32, dtype=torch.float16),
        torch.zeros(20, 32, dtype=torch.bfloat16),
        torch.zeros(16, 40, dtype=torch.bfloat16),
        torch.zeros(32, 16, dtype=torch.bfloat16).T,
        torch.zeros(16, dtype=torch.bfloat16),
    ):
        assert not takes_unpacked(weight)


@needs_product
@pytest.mark.parametrize("dtype", TYPES)
def test_a_weight_for_such_a_product_is_not_packed(dtype: torch.dtype) -> None:
    assert not can_pack(numbers(16, 32, dtype=dtype))
