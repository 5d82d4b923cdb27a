"""Batched attention equals an explicit masked softmax in float32."""

import pytest
import torch

from sglang_qspec.cpu.attention import attend_block, attend_rows, plan_rows, plan_sharing

_SLOTS, _KV_HEADS, _HEADS, _DIM, _VALUE_DIM = 200, 2, 6, 8, 4


@pytest.fixture
def cache() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(_SLOTS, _KV_HEADS, _DIM, generator=random)
    return keys, torch.randn(_SLOTS, _KV_HEADS, _VALUE_DIM, generator=random)


def _naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention of `query` [n, heads, d] over `keys` [T, kv_heads, d]; mask `seen` bool [n, T]."""
    group = query.shape[1] // keys.shape[1]
    key, value = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->hnt", query, key) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), value)


def _requests(lens: list[int]) -> torch.Tensor:
    """Random slots of each request; columns past its length hold arbitrary slots."""
    random = torch.Generator().manual_seed(2)
    slots = torch.randint(0, _SLOTS, (len(lens), max(lens)), generator=random)
    for row, length in enumerate(lens):
        slots[row, :length] = torch.randperm(_SLOTS, generator=random)[:length]
    return slots.int()


def _query(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, _HEADS, _DIM, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("lens", [[9], [1], [7, 7], [30, 4, 1, 17]])
def test_decode_equals_softmax_over_each_requests_own_slots(
    lens: list[int], cache: tuple[torch.Tensor, torch.Tensor]
) -> None:
    slots, query = _requests(lens), _query(len(lens))
    plan = plan_rows(slots, torch.tensor(lens), 1, _KV_HEADS, torch.float32)
    output = attend_rows(plan, query, *cache, _DIM**-0.5)
    for row, length in enumerate(lens):
        own = slots[row, :length].long()
        seen = torch.ones(1, length, dtype=torch.bool)
        expected = _naive(query[row : row + 1], cache[0][own], cache[1][own], seen)
        torch.testing.assert_close(output[row : row + 1], expected)


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
@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_shared_prefix_is_read_once_and_counts_for_each_request(
    prefixes: list[tuple[int, int]],
    lens: list[int],
    width: int,
    cap: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_qspec.cpu.attention._SAVED", 1)
    lens = [length + width - 1 for length in lens]
    texts = [torch.randperm(_SLOTS, generator=torch.Generator().manual_seed(t)) for t in range(3)]
    free = iter(texts[2].tolist() * 2)
    slots = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    for row, ((text, shared), length) in enumerate(zip(prefixes, lens, strict=True)):
        slots[row, :shared] = texts[text][:shared]
        slots[row, shared:length] = torch.tensor([next(free) for _ in range(length - shared)])
    query, kv_lens = _query(len(lens) * width), torch.tensor(lens)
    tree = (torch.rand(len(lens), width, width) < 0.5).tril() | torch.eye(width, dtype=torch.bool)
    plan = plan_sharing(slots, kv_lens, width, _KV_HEADS, torch.float32, tree)
    assert plan.shared is not None
    read = (plan.slots.numel() + plan.shared.slots.numel()) / _KV_HEADS
    assert read < len(lens) * max(lens)
    simple = plan_rows(slots, kv_lens, width, _KV_HEADS, torch.float32, tree)
    expected = attend_rows(simple, query, *cache, _DIM**-0.5, cap)
    torch.testing.assert_close(attend_rows(plan, query, *cache, _DIM**-0.5, cap), expected)


def test_requests_with_little_in_common_are_planned_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_qspec.cpu.attention._SAVED", 1)
    slots = _requests([50, 60, 40])
    lens = torch.tensor([50, 60, 40])
    assert plan_sharing(slots, lens, 1, _KV_HEADS, torch.float32).shared is None


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("prefixes", [[6], [20, 3, 0, 11]])
def test_a_draft_token_attends_only_to_the_prefix_and_its_ancestors(
    prefixes: list[int], width: int, cache: tuple[torch.Tensor, torch.Tensor]
) -> None:
    bs = len(prefixes)
    random = torch.Generator().manual_seed(width)
    mask = torch.eye(width, dtype=torch.bool).repeat(bs, 1, 1)
    for node in range(1, width):
        for b in range(bs):
            mask[b, node] |= mask[b, int(torch.randint(0, node, (1,), generator=random))]
    lens = [prefix + width for prefix in prefixes]
    slots, query = _requests(lens), _query(bs * width)
    plan = plan_rows(slots, torch.tensor(lens), width, _KV_HEADS, torch.float32, visible=mask)
    output = attend_rows(plan, query, *cache, _DIM**-0.5).view(bs, width, _HEADS, _VALUE_DIM)
    for b, length in enumerate(lens):
        own = slots[b, :length].long()
        seen = torch.cat([torch.ones(width, prefixes[b], dtype=torch.bool), mask[b]], 1)
        rows = query.view(bs, width, _HEADS, _DIM)[b]
        torch.testing.assert_close(output[b], _naive(rows, cache[0][own], cache[1][own], seen))


def test_a_sliding_window_masks_older_positions(
    cache: tuple[torch.Tensor, torch.Tensor],
) -> None:
    lens, window = [30, 5], 6
    slots, query = _requests(lens), _query(2)
    kv_lens = torch.tensor(lens)
    plan = plan_rows(
        slots, kv_lens, 1, _KV_HEADS, torch.float32,
        window=window, row_positions=(kv_lens - 1).unsqueeze(1),
    )  # fmt: skip
    output = attend_rows(plan, query, *cache, _DIM**-0.5)
    for row, length in enumerate(lens):
        own = slots[row, :length].long()
        seen = (torch.arange(length) >= length - 1 - window).unsqueeze(0)
        expected = _naive(query[row : row + 1], cache[0][own], cache[1][own], seen)
        torch.testing.assert_close(output[row : row + 1], expected)


@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 9), (13, 4), (40, 1), (5, 60)])
@pytest.mark.parametrize("window", [None, 7])
def test_an_extend_is_causal_after_its_cached_prefix(
    prefix: int, new: int, window: int | None, cache: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("sglang_qspec.cpu.attention._QUERY_BLOCK", 16)
    slots = _requests([prefix + new])[0].long()
    query = _query(new)
    output = attend_block(query, *cache, slots, _DIM**-0.5, window)
    place = torch.arange(prefix + new)
    own = torch.arange(prefix, prefix + new).unsqueeze(1)
    seen = place <= own
    if window is not None:
        seen &= place >= own - window
    torch.testing.assert_close(output, _naive(query, cache[0][slots], cache[1][slots], seen))


def test_bfloat16_stays_close_to_float32(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
    lens = [40, 25]
    slots, query = _requests(lens), _query(2)
    plan = plan_rows(slots, torch.tensor(lens), 1, _KV_HEADS, torch.float32)
    exact = attend_rows(plan, query, *cache, _DIM**-0.5)
    coarse = plan_rows(slots, torch.tensor(lens), 1, _KV_HEADS, torch.bfloat16)
    keys, values = (tensor.bfloat16() for tensor in cache)
    rounded = attend_rows(coarse, query.bfloat16(), keys, values, _DIM**-0.5)
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.03)
