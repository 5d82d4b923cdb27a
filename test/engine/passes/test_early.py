"""Passes without drafts follow each other without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend.trace import KEY
from sglang_qspec.engine.passes import leader
from sglang_qspec.engine.passes.decide import standing
from sglang_qspec.engine.passes.lineup import KnownLens, Lineup
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.request_record import record_of
from sglang_qspec.engine.passes.target_pass import EarlyPass, Pass
from sglang_qspec.engine.passes.tracing import Items
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.policy import DraftUse, PipelinePlan
from sglang_qspec.trie import DraftTrees
from test.engine.passes.stub_engine import Engine, Req, Tokens, noted_decisions
from test.engine.simulation import Clock
from test.engine.speculating import connect, enqueue, make, poll


@pytest.fixture
def early_engine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Speculator], Engine]]:
    module = "sglang_qspec.engine.passes.worker.record_stream_for_v2_verify"
    monkeypatch.setattr(module, lambda *_: None)
    yield lambda active: Engine(active, clock)
    speculation.deactivate()


@pytest.fixture
def engine(early_engine: Callable[[Speculator], Engine]) -> Engine:
    return early_engine(make(None))


def test_a_pass_is_launched_before_the_last_tokens_are_read(engine: Engine) -> None:
    lens = [engine.round() for _ in range(4)]
    assert lens == [[3, 3], [4, 4], [5, 5], [6, 6]]
    assert engine.events == [
        *("launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "launch 4", "wait 3"),
    ]
    assert engine.active.totals.early_passes == 4


def test_every_token_is_recorded_once_and_in_order(engine: Engine) -> None:
    """A request with drafts that are turned off is followed as any other."""
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    engine.runtime.enabled = False
    for _ in range(4):
        assert engine.round() is not None
    live = engine.active.live("a")
    assert live is not None
    engine.active.propose(["a"], [[8, 9, 9, 9]], 4)
    assert live.output_ids == [8, 9, 9, 9]
    tally = engine.active.end("a")
    assert tally is not None
    assert engine.active.totals.pipelines["queue"].passes == tally.passes == 3


def test_tokens_without_a_reader_are_committed_in_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "MAX_LAG", 3)
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    engine.runtime.enabled = False
    live = engine.active.live("a")
    assert live is not None
    lens = [engine.round() and len(live.output_ids) for _ in range(7)]
    assert lens == [1, 1, 2, 2, 2, 5, 5]  # the output on the host before the pass


def test_a_sidecar_that_drafts_gets_every_token_in_order(
    clock: Clock, link: FakeSidecarLink, early_engine: Callable[[Speculator], Engine]
) -> None:
    """Its step drafts resume after passes without a reader, while the last of these still runs."""
    engine = early_engine(connect(link, clock))
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    poll(engine.active)
    live = engine.active.live("a")
    assert live is not None
    engine.runtime.enabled = False
    assert all(engine.round() for _ in range(3))
    assert live.output_ids == [8]
    rounds: Any = SimpleNamespace(
        propose=lambda *_, **__: DraftUse.ALL, begin=lambda *_, **__: PipelinePlan("ahead", 1)
    )
    engine.leader._rounds = rounds
    engine.active.sidecar.lookahead = 4
    assert engine.round() is None
    for length in (5, 6, 7):
        assert engine.round() is not None
        assert live.output_ids == [8] + [9] * (length - 1)


def test_a_request_that_may_get_drafts_makes_the_pass_wait(engine: Engine) -> None:
    engine.round()
    enqueue(engine.active, "a", output_ids=[8, 9], max_new_tokens=50)
    batch = engine.batch()
    assert engine.worker.launches_early(batch) is None
    assert engine.leader._planned is not None
    next(engine.leader.passes(batch))
    assert engine.leader._planned is None


def test_a_batch_too_large_for_drafts_is_served_without_a_wait_and_without_step_drafts(
    clock: Clock, link: FakeSidecarLink, early_engine: Callable[[Speculator], Engine]
) -> None:
    engine = early_engine(connect(link, clock))
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    poll(engine.active)
    assert engine.worker.launches_early(engine.batch()) is None
    assert engine.active.sidecar.lookahead > 0
    engine.leader._proposer._shapes = SimpleNamespace(tiers=(), widths=lambda _: (1,))
    assert engine.round() is not None
    assert engine.active.sidecar.lookahead == 0


@pytest.mark.parametrize(
    "info",
    [
        {"has_grammar": True},
        {"has_custom_logit_processor": True},
        {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
    ],
)
def test_a_batch_that_needs_the_last_tokens_waits(engine: Engine, info: dict[str, Any]) -> None:
    engine.round()
    assert engine.worker.launches_early(engine.batch(**info)) is None


def test_images_and_traces_wait(engine: Engine) -> None:
    engine.round()
    engine.reqs = [Req("c"), engine.reqs[1]]
    engine.reqs[0].multimodal_inputs = object()
    assert engine.worker.launches_early(engine.batch()) is None
    engine.reqs = [Req("c"), Req("d")]
    engine.reqs[1].customized_info = {KEY: Items()}
    assert engine.worker.launches_early(engine.batch()) is None


def test_the_host_does_not_know_lengths_behind_drafts_or_for_ended_requests(
    engine: Engine,
) -> None:
    settlement = engine.worker._settlement

    def coming() -> list[int] | None:
        known = settlement.coming_lens(Lineup(engine.reqs))
        return None if known is None else known.seq_lens.tolist()

    unfinished: Any = object()
    engine.round()
    assert coming() == [4, 4]
    record_of(engine.reqs[0]).prefill = unfinished
    assert coming() is None
    record_of(engine.reqs[0]).prefill = None
    engine.reqs[1].ended = True
    assert coming() is None
    engine.reqs[1].ended = False
    settlement._pending[-1].outcome = None
    assert coming() is None


def test_a_server_without_overlap_waits(engine: Engine) -> None:
    engine.worker._overlap = False
    assert engine.worker.launches_early(engine.batch()) is None


def test_rank_0_chooses_for_all_ranks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, choices = engine.worker._ranks, list[bool]()
    ranks.size = 2

    def choose(*, chosen: bool) -> bool:
        choices.append(chosen)
        return chosen

    monkeypatch.setattr(ranks, "choose", choose)
    known = engine.worker.launches_early(engine.batch())
    assert known is not None
    assert (known.seq_lens.tolist(), known.total) == ([3, 3], 6)
    assert engine.worker.launches_early(engine.batch(has_grammar=True)) is None
    assert choices == [True, False]
    engine.worker._leader = None  # another rank follows
    assert engine.worker.launches_early(engine.batch()) is not None
    assert engine.worker._early is not None
    monkeypatch.setattr(ranks, "choose", lambda **_: False)
    assert engine.worker.launches_early(engine.batch()) is None
    assert engine.worker._early is None


def test_after_a_failure_the_ranks_get_orders_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.worker._ranks.size = 2
    monkeypatch.setattr(engine.worker._ranks, "choose", lambda *, chosen: chosen)
    monkeypatch.setattr(engine.leader.accounting, "begin", None)
    assert engine.worker.launches_early(engine.batch()) is None
    assert speculation.failed()
    engine.worker._ranks._ended = True  # all ranks know
    monkeypatch.setattr(engine.worker._ranks, "choose", None)
    assert engine.worker.launches_early(engine.batch()) is None


def test_a_pass_behind_a_prefill_takes_the_time_after_the_prefill(engine: Engine) -> None:
    engine.round()
    engine.worker.settle(engine.last)
    engine.leader.accounting.interrupt()
    batch: Any = SimpleNamespace(reqs=engine.reqs)
    prefill = Pass(batch, result=object(), outcome=Tokens("prefill", 2, engine.events))
    engine.worker._settlement.add(prefill)
    before = engine.active.totals.pipelines["ahead"].seconds
    engine.last = None
    engine.round()  # takes 0.5 s
    engine.clock.now += 7.0
    engine.worker.settle(prefill.result)
    engine.clock.now += 0.25
    engine.worker.settle(engine.last)
    assert engine.active.totals.pipelines["ahead"].seconds - before == pytest.approx(0.25)


def test_only_a_pass_over_the_same_requests_is_in_place(engine: Engine) -> None:
    def in_place() -> bool:
        known = engine.worker.launches_early(engine.batch())
        assert known is not None
        return known.in_place

    assert not in_place()
    engine.round()
    assert in_place()
    engine.reqs = engine.reqs[::-1]
    assert not in_place()


GREEDY, SAMPLED = {"top_k": 1, "custom_params": None}, {"top_k": 50, "custom_params": {}}
GUESSED = {"top_k": 1, "custom_params": {"qspec_guess_ids": [8, 9]}}


@pytest.mark.parametrize(
    ("first", "second", "grammar", "kind"),
    [
        (GREEDY, GREEDY, None, "greedy"),
        (SAMPLED, SAMPLED, None, "sampled"),
        (GREEDY, GREEDY, "{}", "grammar"),
        (GUESSED, GUESSED, "{}", "guessed"),
        (GREEDY, GUESSED, None, "mixed"),
    ],
)
def test_the_kind_of_a_batch_is_that_of_its_answers(
    engine: Engine, first: dict[str, Any], second: dict[str, Any], grammar: str | None, kind: str
) -> None:
    engine.reqs = [Req("a"), Req("b")]
    for req, sampling in zip(engine.reqs, (first, second), strict=True):
        req.sampling_params, req.grammar = SimpleNamespace(**sampling), grammar
    engine.round()
    assert engine.active.totals.describe()["answer_kind"] == kind


@pytest.fixture
def decisions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_decisions(engine, monkeypatch)


def test_one_decision_stands_for_passes_over_the_same_requests(
    engine: Engine, decisions: list[int]
) -> None:
    for _ in range(2 * standing.PASSES + 1):
        assert engine.round() is not None
    assert len(decisions) == 3
    engine.reqs = engine.reqs[:1]
    engine.round()
    assert decisions == [2, 2, 2, 1]
    engine.leader.prepare_prefill(SimpleNamespace(reqs=[], extend_num_tokens=1))
    engine.round()
    assert decisions == [2, 2, 2, 1, 1]


def test_slow_passes_and_changed_settings_are_decided_anew(
    engine: Engine, decisions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.round()
    for number in range(3):
        engine.active.change_setting("qspec_step_tokens", number + 1)
        engine.runtime.step_tokens = number + 1
        engine.round()
        engine.round()
    assert len(decisions) == 4
    monkeypatch.setattr(standing, "SECONDS", 0.0)
    engine.reqs = engine.reqs[:1]
    for _ in range(3):
        engine.round()
    assert len(decisions) == 7


@pytest.mark.parametrize("passes", [1, 16])
def test_passes_of_a_run_are_counted_whenever_they_are_read(
    engine: Engine, decisions: list[int], monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """All figures are those of passes that are decided and counted one by one."""
    monkeypatch.setattr(standing, "PASSES", passes)
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    engine.runtime.enabled = False
    observed = list[float]()
    monkeypatch.setattr(
        engine.leader.accounting.times, "observe", lambda *args: observed.append(args[-1])
    )
    for number in range(1, 9):
        engine.round()
        engine.clock.now += number / 100
        if number in (3, 7):
            shown = engine.active.describe()["pipelines"]["queue"]
            assert shown["passes"] == number - 1
            assert shown["requests"] == 2 * (number - 1)
            slept = sum(range(number)) / 100
            assert shown["seconds"] == pytest.approx(0.5 * number + slept)
    assert decisions == [2] * (8 if passes == 1 else 1)
    tally = engine.active.end("a")
    assert tally is not None
    assert tally.passes == 7
    assert observed == pytest.approx([1.01, 0.52, 0.53, 0.54, 0.55, 0.56, 0.57])


def test_the_roots_of_an_early_pass_are_no_tokens_of_the_text(engine: Engine) -> None:
    engine.round()
    known = KnownLens(torch.tensor([4, 4]), 8, in_place=False)
    decided = engine.leader.early(engine.batch(), EarlyPass(Lineup(engine.reqs), known))
    assert decided is not None
    assert isinstance(decided.proposal, Proposal)
    assert isinstance(decided.proposal.trees, DraftTrees)
    assert decided.proposal.trees.width == 1
    assert decided.proposal.candidates is None
    assert decided.output_lens == [2, 2]
