"""The compiled attention of a pass equals torch's attention over what each new token sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_qspec.cpu.attention import Heads
from sglang_qspec.cpu.native import native
from sglang_qspec.cpu.row_attention import RowAttention, can_attend

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX2")

ERROR = {torch.float32: 5e-6, torch.bfloat16: 2**-6}
SLOTS = 400


@dataclass
class Pass:
    """Requests with random slots and random trees of new tokens."""

    lens: list[int]
    new: list[int]
    heads: Heads
    dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(sum(self.lens) + self.dim)
        count, most = len(self.lens), max(self.new)
        self.slots = torch.stack(
            [torch.randperm(SLOTS, generator=random)[: max(self.lens)] for _ in range(count)]
        ).int()
        self.visible = torch.zeros(count, most, most, dtype=torch.bool)
        for request in range(count):
            for node in range(most):
                parent = int(torch.randint(max(node, 1), (), generator=random))
                if node:
                    self.visible[request, node] = self.visible[request, parent]
                self.visible[request, node, node] = True
        shape = (self.heads.keys, self.dim)
        self.keys = torch.randn(SLOTS, *shape, generator=random).to(self.dtype)
        self.values = torch.randn(SLOTS, *shape, generator=random).to(self.dtype)
        queries = self.heads.keys * self.heads.group
        rows = torch.randn(sum(self.new), queries + 2, self.dim, generator=random).to(self.dtype)
        self.query = rows[:, :queries]  # part of longer rows

    def attention(self) -> RowAttention:
        lens = torch.tensor(self.lens)
        place = (self.slots, lens, self.new, self.heads, self.dim, self.dim**-0.5)
        return RowAttention(*place, self.visible)

    def expected(self) -> Tensor:
        """[tokens, heads, dim] in float64, token by token."""
        found, first = [], 0
        for request, (length, new) in enumerate(zip(self.lens, self.new, strict=True)):
            for row in range(new):
                sees = torch.ones(length, dtype=torch.bool)
                sees[length - new :] = self.visible[request, row, :new]
                slots = self.slots[request, :length][sees].long()
                key = self.keys[slots].double().repeat_interleave(self.heads.group, 1)
                value = self.values[slots].double().repeat_interleave(self.heads.group, 1)
                query = self.query[first + row].double() * self.dim**-0.5
                weights = torch.einsum("hd,thd->ht", query, key).softmax(-1)
                found.append(torch.einsum("ht,thd->hd", weights, value))
            first += new
        return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("lens", "new", "heads", "dim"),
    [
        ([1], [1], Heads(1, 1), 64),
        ([137, 20, 64, 90, 9], [6, 1, 3, 8, 9], Heads(3, 3), 64),
        ([33, 16, 17], [1, 1, 1], Heads(2, 4), 128),
        ([300, 40], [40, 40], Heads(1, 5), 192),  # several tasks for each request
    ],
)
def test_each_new_token_attends_to_what_it_sees(
    lens: list[int], new: list[int], heads: Heads, dim: int, threads: int, dtype: torch.dtype
) -> None:
    one = Pass(lens, new, heads, dim, dtype)
    assert can_attend(one.query, one.keys, one.values)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = one.attention().attend(one.query, one.keys, one.values)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(found.double(), one.expected(), atol=ERROR[dtype], rtol=ERROR[dtype])


def test_a_request_does_not_depend_on_the_others() -> None:
    both = Pass([137, 90], [6, 8], Heads(3, 3), 64, torch.float32)
    lens, visible = torch.tensor([90]), both.visible[1:]
    alone = RowAttention(both.slots[1:], lens, [8], both.heads, 64, 0.125, visible)
    found = both.attention().attend(both.query, both.keys, both.values)
    assert torch.equal(alone.attend(both.query[6:], both.keys, both.values), found[6:])


def test_masked_tokens_may_have_any_finite_keys_and_values() -> None:
    one = Pass([20], [4], Heads(1, 2), 64, torch.float32)
    one.visible[0] = torch.eye(4, dtype=torch.bool)
    expected = one.attention().attend(one.query, one.keys, one.values)[0]
    other = one.slots[0, 17:].long()
    one.keys[other] = 1e4
    one.values[other] = 1e30
    assert torch.equal(one.attention().attend(one.query, one.keys, one.values)[0], expected)


def test_layers_of_other_shapes_are_left_to_torch() -> None:
    one = Pass([20], [4], Heads(2, 2), 64, torch.float32)
    assert not can_attend(one.query[:, :, :32], one.keys[:, :, :32], one.values[:, :, :32])
    assert not can_attend(one.query.half(), one.keys.half(), one.values.half())
    assert not can_attend(one.query, one.keys.bfloat16(), one.values.bfloat16())
    assert not can_attend(one.query, one.keys, one.values[:, :, :48])


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("lengths", np.array([9]), r"lengths\[0\] is 9, but must be from 1 to 8"),
        ("rows", np.array([3]), r"rows\[0\] is 3, but must be from 1 to 2"),
        ("slots", np.full((1, 8), -1, np.int32), r"slots\[0\]\[0\] is -1"),
        ("visible", np.ones((1, 2, 3), bool), "visible has the shape"),
        ("dim", 96, "dim is 96, but must be a multiple of 64"),
        ("heads", 3, "heads is 3, but must be a multiple of 2"),
    ],
)
def test_a_bad_argument_is_named(argument: str, value: object, says: str) -> None:
    good = {
        "slots": np.zeros((1, 8), np.int32),
        "lengths": np.array([8]),
        "rows": np.array([2]),
        "visible": np.ones((1, 2, 2), bool),
        "heads": 2,
        "kv_heads": 2,
        "dim": 64,
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=says):
        native().RowAttention(**{**good, argument: value})


def test_a_slot_outside_the_pool_is_refused() -> None:
    one = Pass([20], [4], Heads(1, 2), 64, torch.float32)
    with pytest.raises(ValueError, match="slots of the pool is 10"):
        one.attention().attend(one.query, one.keys[:10], one.values[:10])
