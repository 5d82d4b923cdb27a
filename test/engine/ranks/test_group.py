"""Ranks in processes of their own keep in step over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sglang_qspec.engine.ranks import PassOrder, RankGroup
from sglang_qspec.engine.ranks.group import FRAME
from sglang_qspec.engine.ranks.order import encode
from sglang_qspec.tools.ports import free_port
from test.engine.ranks.test_order import trees_of

RANKS = 3
SECONDS = 120
LARGE = trees_of(48, 64, ragged=True)


def joined(rank: int, at: int, act: Callable[[RankGroup], Any]) -> Any:
    """What `act` returns on a rank of a real group."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{at}", rank=rank, world_size=RANKS)
    try:
        group = SimpleNamespace(
            rank_in_group=rank, world_size=RANKS, ranks=[*range(RANKS)], cpu_group=dist.group.WORLD
        )
        return act(RankGroup(group))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context("spawn")) as made:
        yield made


def on_all(pool: ProcessPoolExecutor, act: Callable[[RankGroup], Any]) -> list[Any]:
    at = free_port()
    waiting = [pool.submit(joined, rank, at, act) for rank in range(RANKS)]
    return [one.result(SECONDS) for one in waiting]


def choices(group: RankGroup) -> list[bool]:
    return [group.choose(chosen=group.rank == chooser) for chooser in (0, 1, 0)]


def test_rank_0_chooses_for_all(pool: ProcessPoolExecutor) -> None:
    assert on_all(pool, choices) == [[True, False, True]] * RANKS


def rounds(group: RankGroup) -> list[Any]:
    """Rounds of one and two passes; then rank 1 votes against, in the first of two passes."""
    seen: list[Any] = []
    plans: list[list[list[int] | None]] = [[None], [[0, 2], [1]], [None], [[0], [1]], [None]]
    for number, parts in enumerate(plans):
        ordered = group.begin_round()
        for rows in parts:
            if not ordered:
                seen.append("no order")
                continue
            order = PassOrder(LARGE if number == 2 else trees_of(2, 4, ragged=False), rows)
            order = PassOrder(order.trees, rows, rows is parts[-1])
            if group.rank == 0:
                group.send(order)
            else:
                order = group.receive()
            agrees = not (number == 3 and group.rank == 1 and order.rows == [0])
            assert order.trees is not None
            rows_run = order.trees.rows
            seen.append((rows_run, order.rows, order.last, group.dissenter(agrees=agrees)))
    return [*seen, group.speculates]


def ends(group: RankGroup) -> list[Any]:
    """Rank 0 says that speculation has ended on it; the present round goes on with orders."""
    seen: list[Any] = []
    for _ in range(2):
        if not group.begin_round():
            return [*seen, "no order", group.speculates]
        for last in (False, True):
            order = PassOrder(None, [int(last)], last, speculates=False)
            if group.rank == 0:
                group.send(order)
            else:
                order = group.receive()
            seen.append((order.rows, order.last, order.speculates))
    return seen


def test_all_ranks_run_the_passes_of_rank_0_until_one_votes_against(
    pool: ProcessPoolExecutor,
) -> None:
    assert len(encode(PassOrder(LARGE))) > FRAME
    found = on_all(pool, rounds)
    assert found[0] == [
        (8, None, True, None),
        (8, [0, 2], False, None),
        (8, [1], True, None),
        (LARGE.rows, None, True, None),
        (8, [0], False, 1),
        (8, [1], True, None),
        "no order",
        False,
    ]
    assert found[1:] == found[:1] * (RANKS - 1)
    found = on_all(pool, ends)
    assert found[0] == [([0], False, False), ([1], True, False), "no order", False]
    assert found[1:] == found[:1] * (RANKS - 1)


def test_a_single_rank_sends_nothing() -> None:
    group = RankGroup()
    assert not group.begin_round()
    group.send(PassOrder())
    assert group.dissenter(agrees=True) is None
    assert group.dissenter(agrees=False) == 0
