"""Products with packed weights equal torch's."""

import pytest
import torch

from sglang_qspec.cpu.dense_linear import can_pack, pack, packed_linear


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
