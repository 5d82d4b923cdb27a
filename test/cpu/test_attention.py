"""Batched attention equals an explicit masked softmax in float32."""

import pytest
import torch

from sglang_qspec.cpu.attention import BlockPlan, Heads, attend_block, attend_rows, plan_rows

_SLOTS, _KV_HEADS, _HEADS, _DIM = 200, 2, 6, 8
_SHARING = Heads(_KV_HEADS, _HEADS // _KV_HEADS)


@pytest.fixture(params=[8, 4], ids=["values_as_wide_as_keys", "narrower_values"])
def cache(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(_SLOTS, _KV_HEADS, _DIM, generator=random)
    return keys, torch.randn(_SLOTS, _KV_HEADS, request.param, generator=random)


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
    plan = plan_rows(slots, torch.tensor(lens), 1, _SHARING, torch.float32)
    output, _ = attend_rows(plan, query, *cache, _DIM**-0.5)
    for row, length in enumerate(lens):
        own = slots[row, :length].long()
        seen = torch.ones(1, length, dtype=torch.bool)
        expected = _naive(query[row : row + 1], cache[0][own], cache[1][own], seen)
        torch.testing.assert_close(output[row : row + 1], expected)


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
    plan = plan_rows(slots, torch.tensor(lens), width, _SHARING, torch.float32, visible=mask)
    output, _ = attend_rows(plan, query, *cache, _DIM**-0.5)
    output = output.view(bs, width, _HEADS, -1)
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
    plan = plan_rows(slots, torch.tensor(lens), 1, _SHARING, torch.float32, window=window)
    output, _ = attend_rows(plan, query, *cache, _DIM**-0.5)
    for row, length in enumerate(lens):
        own = slots[row, :length].long()
        seen = (torch.arange(length) >= length - 1 - window).unsqueeze(0)
        expected = _naive(query[row : row + 1], cache[0][own], cache[1][own], seen)
        torch.testing.assert_close(output[row : row + 1], expected)


@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 9), (13, 4), (40, 1), (5, 60)])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kept", [0, 2**20])
def test_an_extend_is_causal_after_its_cached_prefix(
    prefix: int, new: int, window: int | None, kept: int, cache: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("sglang_qspec.cpu.attention._QUERY_BLOCK", 16)
    monkeypatch.setattr("sglang_qspec.cpu.attention._MOST_KEPT", kept)
    slots = _requests([prefix + new])[0].long()
    query = _query(new)
    plan = BlockPlan(slots, new, _SHARING, torch.float32, window)
    place = torch.arange(prefix + new)
    own = torch.arange(prefix, prefix + new).unsqueeze(1)
    seen = place <= own
    if window is not None:
        seen &= place >= own - window
    expected = _naive(query, cache[0][slots], cache[1][slots], seen)
    for _ in range(2):  # two layers share the plan
        output = attend_block(plan, query, *cache, _DIM**-0.5)
        torch.testing.assert_close(output, expected)


def test_bfloat16_stays_close_to_float32(cache: tuple[torch.Tensor, torch.Tensor]) -> None:
    lens = [40, 25]
    slots, query = _requests(lens), _query(2)
    plan = plan_rows(slots, torch.tensor(lens), 1, _SHARING, torch.float32)
    exact, _ = attend_rows(plan, query, *cache, _DIM**-0.5)
    coarse = plan_rows(slots, torch.tensor(lens), 1, _SHARING, torch.bfloat16)
    keys, values = (tensor.bfloat16() for tensor in cache)
    rounded, _ = attend_rows(coarse, query.bfloat16(), keys, values, _DIM**-0.5)
    torch.testing.assert_close(rounded.float(), exact, atol=0.03, rtol=0.03)
