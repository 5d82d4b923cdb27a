"""The compiled operations of a target's decoder layer equal torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sglang_qspec.cpu import row_ops
from sglang_qspec.cpu.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX2")

ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Largest relative error by dtype; bfloat16 results are rounded once."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(found: Tensor, exact: Tensor) -> None:
    error = ERROR[found.dtype]
    assert torch.allclose(found.float(), exact, rtol=error, atol=error)


@DTYPES
def test_the_norm_is_torchs(dtype: torch.dtype) -> None:
    rows, weight = random(13, 576, dtype=dtype), random(576)
    found = row_ops.rms_norm(rows, weight, 1e-5)
    assert_near(found, rms_norm(rows.float(), (576,), weight, 1e-5))


@DTYPES
def test_the_gate_is_torchs(dtype: torch.dtype) -> None:
    rows = 4 * random(13, 192, dtype=dtype)
    gate, up = rows.float().chunk(2, -1)
    assert_near(row_ops.silu_and_mul(rows), silu(gate) * up)


@DTYPES
def test_the_rotation_changes_the_first_heads_only(dtype: torch.dtype) -> None:
    rows, angles = random(7, 5, 64, dtype=dtype), random(7, 64)
    before = rows.clone()
    row_ops.rotate_(rows[:, :3], angles)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    a, b = before[:, :3].float().chunk(2, -1)
    assert_near(rows[:, :3], torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    assert torch.equal(rows[:, 3:], before[:, 3:])


@DTYPES
def test_rows_are_stored_in_their_slots(dtype: torch.dtype) -> None:
    rows, slots = random(4, 6, 32, dtype=dtype), torch.tensor([8, 1, 5, 0])
    pool = random(9, 2, 32, dtype=dtype)
    expected = pool.index_copy(0, slots, rows[:, 4:])
    row_ops.store_rows(rows[:, 4:], slots, pool)
    assert torch.equal(pool, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Many rows are shared among threads, and few are not."""
    many = random(300, 576)
    weight = random(576)
    assert torch.equal(
        row_ops.rms_norm(many, weight, 1e-5)[7:8],
        row_ops.rms_norm(many[7:8].contiguous(), weight, 1e-5),
    )
    assert torch.equal(
        row_ops.silu_and_mul(many)[7:8], row_ops.silu_and_mul(many[7:8].contiguous())
    )


def test_other_dtypes_and_widths_are_left_to_torch() -> None:
    assert row_ops.can_run(random(1, 32), 32, 16)
    assert not row_ops.can_run(random(1, 32), 24)
    assert not row_ops.can_run(random(1, 32, dtype=torch.float16), 32)
