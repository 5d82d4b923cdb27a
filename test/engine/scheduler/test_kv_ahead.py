"""KV slots that are reserved for several passes are enough for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.scheduler import kv_ahead

LONGEST = 4
"""KV slots that the longest pass takes of a request."""


class Request:
    def __init__(self) -> None:
        self.committed = self.true = 10
        """Length of the text as SGLang has counted it, and on the device."""
        self.allocated = 10
        self.decode_batch_idx = 0


class Scheduler:
    """SGLang's reservation, and its order of events."""

    def __init__(self) -> None:
        self.overlap = True
        self.penalizes = False
        self.reqs = [Request(), Request()]
        self.uncounted: dict[Request, int] = {}
        """Tokens of the last pass."""
        self.reservations = 0

    def _missing(self, batch: Any, indices: object = None) -> int:
        assert indices is None
        return sum(max(0, r.committed + 2 * LONGEST - r.allocated) for r in batch.reqs)

    def _reserve(self, batch: Any) -> None:
        self.reservations += 1
        for req in batch.reqs:
            req.decode_batch_idx += 1
            req.allocated = max(req.allocated, req.committed + 2 * LONGEST)

    def round(self, tokens: int = 1, *, early: bool = True) -> bool:
        """A pass that gives `tokens` tokens of each request; whether SGLang reserved slots."""
        before = self.reservations
        batch = self.batch()
        required = kv_ahead.tokens_required(self._missing, batch)
        kv_ahead.prepare(self._reserve, batch)
        assert not self._missing(batch) or self.reservations == before
        assert self.reservations > before or required == 0
        if self.overlap:
            kv_ahead.note_pass(one_slot=early)
        for req in self.reqs:
            # A pass may always turn out to be the longest.
            assert req.true + LONGEST <= req.allocated
            req.true += tokens
        taken = dict.fromkeys(self.reqs, tokens)
        # With overlap SGLang counts the tokens of the last pass, otherwise those of this one.
        counted, self.uncounted = (self.uncounted, taken) if self.overlap else (taken, {})
        for req, count in counted.items():
            req.committed += count
        if not self.overlap:
            kv_ahead.note_pass(one_slot=tokens == 1)
        return self.reservations > before

    def batch(self) -> Any:
        penalties = SimpleNamespace(is_required=self.penalizes)
        info = SimpleNamespace(penalizer_orchestrator=penalties)
        return SimpleNamespace(reqs=self.reqs, sampling_info=info, maybe_evict_swa=lambda: None)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(kv_ahead, "get_alloc_reserve_per_decode", lambda: 2 * LONGEST)
    monkeypatch.setattr(kv_ahead, "_reserve", kv_ahead._Reserve())
    made = Scheduler()
    yield made
    assert all(req.decode_batch_idx > 0 for req in made.reqs)


def test_early_passes_over_the_same_requests_reserve_once_for_the_longest_pass(
    scheduler: Scheduler,
) -> None:
    assert [scheduler.round() for _ in range(9)] == [True, *[False] * 3, True, *[False] * 3, True]
    assert [req.decode_batch_idx for req in scheduler.reqs] == [9, 9]


def test_a_pass_with_drafts_reserves_before_the_next_one(scheduler: Scheduler) -> None:
    assert [scheduler.round(), scheduler.round()] == [True, False]
    assert not scheduler.round(LONGEST, early=False)  # the slots are there
    assert [scheduler.round(LONGEST, early=False) for _ in range(3)] == [True] * 3
    assert scheduler.round(early=False)  # behind drafts no pass is early
    assert [scheduler.round(), scheduler.round()] == [True, False]


def test_without_overlap_all_passes_without_drafts_share_a_reservation(
    scheduler: Scheduler,
) -> None:
    scheduler.overlap = False
    assert [scheduler.round() for _ in range(5)] == [True, False, False, False, True]
    assert not scheduler.round(LONGEST)  # the slots are there
    assert [scheduler.round(), scheduler.round()] == [True, False]


def test_requests_with_penalties_reserve_before_each_pass(scheduler: Scheduler) -> None:
    scheduler.round()
    scheduler.penalizes = True
    assert [scheduler.round() for _ in range(3)] == [True] * 3


def test_other_requests_reserve_at_once(scheduler: Scheduler) -> None:
    scheduler.round()
    scheduler.reqs = [*scheduler.reqs, Request()]
    assert scheduler.round()
    assert not scheduler.round()
    scheduler.reqs = scheduler.reqs[1:]
    assert scheduler.round()


def test_a_part_of_a_batch_is_counted_as_sglang_counts_it(scheduler: Scheduler) -> None:
    scheduler.round()
    batch = scheduler.batch()
    assert kv_ahead.tokens_required(lambda _, indices: len(indices), batch, [0]) == 1
