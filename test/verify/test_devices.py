"""Draws and penalties stay on the device of their inputs, and do not make the host wait for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sglang_qspec.verify import rows as picking
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.penalties import BatchPenalties, penalize
from sglang_qspec.verify.rejection import Proposals, sample_near
from sglang_qspec.verify.sample import (
    Draws,
    distributions,
    likeliest_left,
    sample_probs,
    sample_targets,
)
from test.verify.fake_cuda import CUDA, Costs, fake_cuda

ROWS, VOCAB = 64, 3000


def floats(*shape: int) -> Tensor:
    return torch.rand(*shape, device=CUDA)


def numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=CUDA)


def proposals() -> Proposals:
    known = torch.ones(ROWS, dtype=torch.bool, device=CUDA)
    return Proposals(known, numbers(ROWS), numbers(ROWS, 4), floats(ROWS, 4))


def draws_of(filters: str, *, seeded: bool, near: bool, rank_limit: int | None) -> Draws:
    return Draws(
        numbers(ROWS).int() if "k" in filters else None,
        floats(ROWS) if "p" in filters else None,
        floats(ROWS) if "m" in filters else None,
        numbers(ROWS) if seeded else None,
        numbers(ROWS),
        proposals() if near else None,
        rank_limit,
    )


def launched(costs: Costs) -> int:
    """Number of kernels. Behind the kernel of `gumbel_triton`, two choose among its parts."""
    return len(costs.kernels) + 2 * sum("gumbel_argmax" in name for name in costs.kernels)


def penalties_of(requests: int) -> BatchPenalties:
    return BatchPenalties(
        rows=numbers(requests),
        frequency=floats(requests),
        presence=floats(requests),
        repetition=floats(requests),
        min_new_tokens=numbers(requests),
        stop_ids=numbers(requests, 1),
        output_lens=numbers(requests),
        output_ids=numbers(requests, 7),
        output_counts=floats(requests, 7),
    )


def trees_of(requests: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ancestors and rows of the nodes of a batch's trees."""
    mask = torch.ones(requests, width, width, dtype=torch.bool, device=CUDA)
    return numbers(requests, width), mask, numbers(requests, width)


@pytest.mark.parametrize("rank_limit", [20, None])
@pytest.mark.parametrize("filters", ["", "k", "p", "kpm"])
@pytest.mark.parametrize(("seeded", "near"), list(itertools.product([False, True], repeat=2)))
def test_draws_stay_on_the_device_and_do_not_wait_for_it(
    filters: str, seeded: bool, near: bool, rank_limit: int | None
) -> None:
    with fake_cuda() as costs:
        draws = draws_of(filters, seeded=seeded, near=near, rank_limit=rank_limit)
        drawn = sample_targets(floats(ROWS, VOCAB), floats(ROWS), draws)
        assert (drawn.device, drawn.dtype, drawn.shape) == (CUDA, torch.int64, (ROWS,))
    assert not costs.synchronisations
    assert not costs.uploads


def test_a_sampled_pass_launches_few_kernels() -> None:
    for filters, expected in (("", 6), ("p", 8), ("k", 11), ("kpm", 9)):
        for rank_limit in (20, None):
            with fake_cuda():
                logits, temperatures = floats(ROWS, VOCAB), floats(ROWS)
                draws = draws_of(filters, seeded=True, near=False, rank_limit=rank_limit)
                with Costs() as costs:
                    sample_targets(logits, temperatures, draws)
            assert launched(costs) == expected, (filters, costs.kernels)


def test_all_that_a_pass_may_ask_for_takes_at_most_40_kernels() -> None:
    with fake_cuda():
        logits, temperatures = floats(ROWS, VOCAB), floats(ROWS)
        draws = draws_of("kpm", seeded=True, near=False, rank_limit=None)
        penalties, rest = penalties_of(ROWS // 4), trees_of(ROWS // 4, 4)
        with Costs() as costs:
            penalize(logits, penalties, *rest)
            sample_targets(logits, temperatures, draws)
    assert launched(costs) <= 40, costs.kernels
    assert not costs.synchronisations


def test_no_draw_without_filters_waits_for_the_device() -> None:
    with fake_cuda() as costs:
        draws = draws_of("", seeded=True, near=True, rank_limit=None)
        drawn = [
            sample_probs(floats(ROWS, VOCAB), draws),
            sample_near(floats(ROWS, VOCAB), proposals()),
            likeliest(floats(ROWS, VOCAB)),
            gumbel_argmax(floats(ROWS, VOCAB), numbers(ROWS), numbers(ROWS)),
            distributions(floats(ROWS, VOCAB), draws),
            *likeliest_left(floats(ROWS, VOCAB), draws, 5),
        ]
        assert {values.device for values in drawn} == {CUDA}
    assert not costs.synchronisations
    assert not costs.uploads


def test_penalties_stay_on_the_device() -> None:
    with fake_cuda() as costs:
        penalize(floats(12, VOCAB), penalties_of(2), *trees_of(3, 4))
    assert not costs.synchronisations
    assert not costs.uploads


def test_both_ways_to_treat_rows_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices compute all rows and choose by mask; a CPU picks rows out."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(60, VOCAB, generator=generator) * 3
    near = Proposals(
        torch.arange(60) % 4 == 3,
        torch.full((60,), 2),
        torch.tensor([[2, 3]]).repeat(60, 1),
        torch.tensor([[0.4, 0.6]]).repeat(60, 1),
    )
    # The target has 2 and 3 with half each, so it keeps each drafted 2, and would draw both.
    logits[3::4, 2:4] = 60.0
    draws = Draws(
        torch.tensor([1, VOCAB, 7]).repeat(20),
        torch.tensor([1.0, 0.9, 1.0, 1.0]).repeat(15),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05]).repeat(12),
        torch.arange(60),
        torch.arange(60),
        near,
    )
    chosen = []
    for picks in (True, False):
        monkeypatch.setattr(picking, "picks", lambda _mask, picks=picks: picks)
        chosen.append(sample_targets(logits, torch.ones(60), draws))
    assert torch.equal(*chosen)
    assert len(set(chosen[0].tolist())) > 5
