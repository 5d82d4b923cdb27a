"""The attention of a whole pass equals the attention of each of its requests alone."""

import pytest
import torch

from sglang_qspec.cpu import pass_plan
from sglang_qspec.cpu.attention import Heads, attend_rows, plan_rows
from sglang_qspec.cpu.pass_plan import _similar, attend_pass, plan_pass

_SLOTS, _HEADS, _DIM = 200, Heads(2, 3), 8


@pytest.fixture
def cache() -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(
        2, _SLOTS, _HEADS.keys, _DIM, generator=torch.Generator().manual_seed(1)
    )
    return keys, values


def _query(tokens: int) -> torch.Tensor:
    heads = _HEADS.keys * _HEADS.group
    return torch.randn(tokens, heads, _DIM, generator=torch.Generator().manual_seed(3))


def _trees(requests: int, width: int) -> torch.Tensor:
    mask = torch.rand(requests, width, width, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[:, :, 0] = True  # every node sees the root
    return mask.tril() | torch.eye(width, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prefixes", "lens"),
    [
        ([(0, 60), (0, 60), (0, 60)], [70, 61, 64]),
        ([(0, 40), (1, 50), (0, 40), (1, 50), (0, 40)], [41, 51, 45, 60, 48]),
        ([(0, 50), (0, 50), (1, 0), (0, 50), (2, 0)], [52, 51, 7, 55, 1]),
        ([(0, 50), (0, 70), (0, 70)], [60, 72, 75]),
    ],
)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("new", [[1] * 5, [3] * 5, [5, 1, 2, 9, 1]])
def test_a_shared_prefix_is_read_once_and_counts_for_each_request(
    prefixes: list[tuple[int, int]],
    lens: list[int],
    new: list[int],
    cap: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_plan, "_SAVED", 1)
    new = new[: len(lens)]
    lens = [length + added - 1 for length, added in zip(lens, new, strict=True)]
    texts = [torch.randperm(_SLOTS, generator=torch.Generator().manual_seed(t)) for t in range(3)]
    free = iter(texts[2].tolist() * 2)
    slots = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    for row, ((text, shared), length) in enumerate(zip(prefixes, lens, strict=True)):
        slots[row, :shared] = texts[text][:shared]
        slots[row, shared:length] = torch.tensor([next(free) for _ in range(length - shared)])
    query, tree = _query(sum(new)), _trees(len(lens), max(new))
    kv_lens = torch.tensor(lens)
    plan = plan_pass(slots, kv_lens, new, _HEADS, torch.float32, visible=tree)
    assert plan.prefixes is not None
    read = sum(part.slots.numel() for part in (*plan.groups, plan.prefixes)) / _HEADS.keys
    assert read < len(lens) * max(lens)
    output = attend_pass(plan, query, *cache, _DIM**-0.5, cap)
    for row, own in enumerate(query.split(new)):
        seen = tree[row : row + 1, : new[row], : new[row]]
        simple = plan_rows(slots[[row]], kv_lens[[row]], new[row], _HEADS, torch.float32, seen)
        expected, _ = attend_rows(simple, own, *cache, _DIM**-0.5, cap)
        start = sum(new[:row])
        torch.testing.assert_close(output[start : start + new[row]], expected)


def test_requests_with_little_in_common_share_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_plan, "_SAVED", 1)
    random = torch.Generator().manual_seed(2)
    slots = torch.stack([torch.randperm(_SLOTS, generator=random) for _ in range(3)])
    lens = torch.tensor([50, 60, 40])
    assert plan_pass(slots, lens, [1, 1, 1], _HEADS, torch.float32).prefixes is None


def test_a_shared_prefix_has_no_row_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_plan, "_SAVED", 1)
    new = [9, 1, 1, 2]
    lens = torch.tensor([60 + added for added in new])
    slots = torch.arange(80).repeat(4, 1)
    slots[:, 60:] += 20 * torch.arange(4).unsqueeze(1)
    plan = plan_pass(slots, lens, new, _HEADS, torch.float32, visible=_trees(4, 9))
    assert plan.prefixes is not None
    assert plan.prefixes.batch * plan.prefixes.rows == sum(new)
    assert plan.sharing is None


def test_requests_are_split_where_that_saves_the_most_rows() -> None:
    assert _similar([]) == [[]]
    assert _similar([8] * 5) == [[0, 1, 2, 3, 4]]
    assert _similar([1, 2, 3]) == [[0, 1, 2]]
    assert _similar([64, 1, 1, 2]) == [[1, 2, 3], [0]]
    assert _similar([30, 1, 31, 2, 3]) == [[1, 3, 4], [0, 2]]
