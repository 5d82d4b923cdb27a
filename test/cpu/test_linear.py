"""Products with packed weights, compared with the float weights of their grid."""

import pytest
import torch

from sglang_qspec.cpu import linear
from sglang_qspec.cpu.linear import INT4_ROWS, TWO_DIGIT_ROWS, Int4Linear, Int8Linear
from sglang_qspec.cpu.linear_grids import Grid, round_int4, round_int8
from sglang_qspec.cpu.native import native

ROWS = (1, TWO_DIGIT_ROWS, TWO_DIGIT_ROWS + 1, 64, 65, 130)


def weight(n: int = 48, k: int = 96) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def inputs(m: int) -> torch.Tensor:
    """Rows of very different magnitudes, each with an outlier and a nonzero mean."""
    x = torch.randn(m, 96, generator=torch.Generator().manual_seed(m)) + 0.5
    x[:, 3] *= 20
    return x * torch.logspace(-3, 3, m)[:, None]


def row_errors(y: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (y.float() - expected).norm(dim=1) / expected.norm(dim=1)


@pytest.mark.parametrize("m", ROWS)
def test_an_int8_product_is_close_to_the_float_product_for_each_row(m: int) -> None:
    grid = round_int8(weight())
    y = Int8Linear(grid)(inputs(m))
    exact = m <= TWO_DIGIT_ROWS or native().EXACT_DIGITS == 1
    tolerance = 5e-4 if exact else 2e-2
    assert row_errors(y, inputs(m) @ grid.dequantize().T).max() < tolerance


def test_scales_are_float32_while_sglang_loads_a_model_in_another_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        grid = round_int8(weight().bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)
    assert grid.scale.dtype == torch.float32


def test_the_product_of_a_row_does_not_depend_on_the_other_rows() -> None:
    product = Int8Linear.quantize(weight())
    x = inputs(40)
    assert torch.equal(product(x)[7:20], product(x[7:20]))


def test_inputs_that_are_zero_or_constant_give_exact_products() -> None:
    grid = round_int8(weight())
    product = Int8Linear(grid)
    for m in (1, 8):
        assert torch.equal(product(torch.zeros(m, 96)), torch.zeros(m, 48))
        y = product(torch.full((m, 96), 3.0))
        assert row_errors(y, torch.full((m, 96), 3.0) @ grid.dequantize().T).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_leading_dimensions_bias_and_type_are_those_of_a_linear_layer(
    kind: type[Int8Linear] | type[Int4Linear], dtype: torch.dtype
) -> None:
    grid = round_int8(weight()) if kind is Int8Linear else round_int4(weight(), 32)
    bias = torch.arange(48.0)
    x = torch.randn(2, 5, 96)
    y = kind(grid)(x.to(dtype), bias.to(dtype))
    assert y.shape == (2, 5, 48)
    assert y.dtype == dtype
    expected = torch.nn.functional.linear(x, grid.dequantize(), bias).view(10, 48)
    assert row_errors(y.view(10, 48), expected).max() < 2e-2


def test_no_rows_give_no_rows() -> None:
    assert Int8Linear.quantize(weight())(torch.empty(0, 96)).shape == (0, 48)
    assert Int4Linear.quantize(weight(), 32)(torch.empty(0, 96)).shape == (0, 48)


@pytest.mark.parametrize("group_size", [32, 96, 48, 16])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_an_int4_product_is_close_to_the_float_product_for_any_group_size(
    group_size: int, m: int
) -> None:
    grid = round_int4(weight(), group_size)
    x = inputs(m)
    exact = m <= INT4_ROWS and group_size % 32 == 0
    tolerance = 1e-4 if exact else 2e-2
    assert row_errors(Int4Linear(grid)(x), x @ grid.dequantize().T).max() < tolerance


def test_int4_weights_with_an_odd_number_of_channels_are_multiplied() -> None:
    grid = round_int4(weight(n=41), 32)
    y = Int4Linear(grid)(inputs(1))
    assert row_errors(y, inputs(1) @ grid.dequantize().T).max() < 2e-2


def test_an_int4_product_refuses_a_grid_of_8_bits() -> None:
    with pytest.raises(ValueError, match=r"0\.\.15"):
        Int4Linear(round_int8(weight()))


def test_rounding_to_int8_errs_by_half_a_step_at_most() -> None:
    grid = round_int8(weight())
    assert ((grid.dequantize() - weight()).abs() <= grid.scale * 0.5001).all()
    assert grid.q.abs().max() == 127


def test_rounding_to_int4_keeps_weights_that_are_on_an_int4_grid() -> None:
    q = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    q[:, ::32], q[:, 1::32] = 0, 15
    zero = torch.randint(1, 15, (8, 2)).float()
    on_grid = Grid(q, torch.rand(8, 2) + 0.1, zero)
    found = round_int4(on_grid.dequantize(), 32)
    torch.testing.assert_close(found.dequantize(), on_grid.dequantize())


def test_rounding_to_int4_beats_a_grid_that_keeps_the_largest_weight() -> None:
    w = weight(64, 128)
    groups = w.view(64, 2, 64)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    zero = (-low / step).round()
    plain = (((groups / step) + zero).round().clamp(0, 15) - zero) * step
    error = (round_int4(w, 64).dequantize() - w).norm()
    assert error < 0.98 * (plain.view(64, 128) - w).norm()


def test_a_grid_per_channel_keeps_its_integers_and_a_grouped_grid_is_rounded() -> None:
    q = torch.randint(0, 256, (4, 8), dtype=torch.uint8)
    symmetric = Grid(q, torch.rand(4, 1), torch.full((4, 1), 128.0))
    same = symmetric.per_channel()
    assert torch.equal(same.q.short(), q.short() - 128)
    assert torch.equal(same.scale, symmetric.scale)

    grouped = round_int4(weight(), 32)
    rounded = grouped.per_channel()
    assert rounded.scale.shape == (48, 1)
    step = grouped.dequantize().abs().amax(1, keepdim=True) / 127
    assert ((rounded.dequantize() - grouped.dequantize()).abs() <= step * 0.5001).all()


def test_an_asymmetric_grid_per_channel_that_leaves_int8_is_rounded() -> None:
    q = torch.tensor([[0, 255]], dtype=torch.uint8)
    grid = Grid(q, torch.ones(1, 1), torch.zeros(1, 1)).per_channel()
    torch.testing.assert_close(grid.dequantize(), torch.tensor([[0.0, 255.0]]))


def test_int8_weights_are_multiplied_without_a_compiled_product_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "native", lambda: None)
    grid = round_int8(weight())
    for m in (1, 9):
        y = Int8Linear(grid)(inputs(m))
        assert row_errors(y, inputs(m) @ grid.dequantize().T).max() < 2e-2
