"""Passes without drafts follow each other without a wait of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend.trace import KEY
from sglang_qspec.engine.passes import leader
from sglang_qspec.engine.passes.decide import standing
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.launch.future_map import LastTokens
from sglang_qspec.engine.passes.launch.relay import relayed
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.lineup import KnownLens, Lineup
from sglang_qspec.engine.passes.outcome import ComingTokens, PlainOutcome
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.request_record import record_of
from sglang_qspec.engine.passes.settlement import Settlement
from sglang_qspec.engine.passes.target_pass import EarlyPass, Pass
from sglang_qspec.engine.passes.tracing import Items
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.ranks import RankGroup
from sglang_qspec.engine.scheduler import early
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.policy import DraftUse, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees
from test.engine.simulation import Clock
from test.engine.speculating import connect, enqueue, make, poll

PROMPT = [5, 6, 7]


class Req:
    """The part of SGLang's request that early passes read."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.origin_input_ids = PROMPT
        self.output_ids = [8]
        self.customized_info: dict[str, Any] | None = None
        self.multimodal_inputs: object | None = None
        self.grammar: object | None = None
        self.sampling_params = SimpleNamespace(top_k=1, custom_params=None)
        self.is_retracted = False
        self.inflight_middle_chunks = 0
        self.ended = False

    def finished(self) -> bool:
        return self.ended


class Tokens(ComingTokens):
    """The tokens of a pass; `events` records when the host waits for them."""

    def __init__(self, name: str, requests: int, events: list[str]) -> None:
        self._name, self._events = name, events
        self._tokens = [9] * requests

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")

    def read(self) -> PlainOutcome:
        self.wait()
        return PlainOutcome(self._tokens)


class Launcher:
    """Launches passes in name only."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._count = 0

    def plain(self, decided: Pass) -> None:
        self._count += 1
        self._events.append(f"launch {self._count}")
        decided.result = SimpleNamespace(new_seq_lens=None)
        decided.outcome = Tokens(str(self._count), len(decided.reqs), self._events)


class Engine:
    """A worker with SGLang's order of events: a result is processed behind the next launch."""

    def __init__(self, active: Speculator, clock: Clock, *, overlap: bool = True) -> None:
        self.active, self.clock = active, clock
        self.events: list[str] = []
        self.runtime = RuntimeSettings.of(QSpecConfig(), 8)
        self.leader = Leader(
            active,
            self.runtime,
            SimpleNamespace(tiers=(), widths=lambda _: None),
            "cpu",
            chains=False,
            overlap=overlap,
        )
        self.leader.accounting = PassAccounting(active, self.runtime, clock)
        self.worker = QSpecWorker.__new__(QSpecWorker)
        self.worker._overlap = overlap
        self.worker._device = "cpu"
        self.worker._early = None
        self.worker._lineup = Lineup([])
        self.worker._ranks = RankGroup()
        self.worker._leader = self.leader
        launcher: Any = Launcher(self.events)
        self.worker._launcher = launcher
        self.worker._settlement = Settlement(self.leader.accounting, overlap=overlap)
        self.reqs = [Req(rid) for rid in "ab"]
        self.last: Any = None

    def batch(self, **info: Any) -> Any:
        flags = {"has_custom_logit_processor": False, "has_watermark_candidates": False}
        penalties = SimpleNamespace(is_required=False)
        lens = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in self.reqs]
        return SimpleNamespace(
            reqs=self.reqs,
            forward_mode=ForwardMode.DECODE,
            spec_info=SimpleNamespace(future_indices=torch.arange(len(self.reqs))),
            has_grammar=info.pop("has_grammar", False),
            seq_lens_cpu=torch.tensor(lens),
            sampling_info=SimpleNamespace(**{**flags, "penalizer_orchestrator": penalties, **info}),
        )

    def round(self, batch: Any = None) -> list[int] | None:
        """Launch a pass, then process the last one. Returns the lengths of an early pass."""
        batch = batch or self.batch()
        known = self.worker.launches_early(batch)
        if known is not None:
            batch.seq_lens_cpu = known.seq_lens
        elif self.last is not None:  # the device knows the tokens of the last pass
            batch.seq_lens_cpu += 1
        result = self.worker.forward_batch_generation(batch)
        self.clock.now += 0.5
        if self.last is not None:
            self.worker.settle(self.last)
            for req in self.reqs:
                req.output_ids.append(9)
        self.last = result
        return None if known is None else known.seq_lens.tolist()


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


@pytest.mark.parametrize("in_place", [True, False])
def test_known_lengths_are_taken_once_and_without_a_copy_from_the_device(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """A pass over the same requests as the last one even reads the last one's own tensors."""
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
    algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
    future_map = LastTokens(torch.device("cpu"), algorithm, pool)
    slots, lens, ids = torch.tensor([3, 1]), torch.tensor([40, 50]), torch.tensor([7, 8])
    relay = relayed(ids, torch.ones(2, dtype=torch.int32), lens)
    future_map.publish(slots, lens)
    future_map.stash(slots, RelayPayload.from_ngram(relay))
    relay.future_indices = slots
    batch: Any = SimpleNamespace(spec_info=relay)
    worker = QSpecWorker.__new__(QSpecWorker)
    known = KnownLens(lens, 90, in_place)
    monkeypatch.setattr(worker, "launches_early", lambda _: known, raising=False)
    scheduler = SimpleNamespace(enable_overlap=True, future_map=future_map, model_worker=worker)
    early.decide(scheduler, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FutureMap, "resolve_seq_lens_cpu", None)
        future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [40, 50]
    assert relay.accept_tokens.tolist() == [7, 8]
    assert (batch.seq_lens is lens) == (relay.accept_tokens is ids) == in_place
    assert batch.seq_lens_sum == 90
    future_map.publish(slots, torch.tensor([41, 51]))
    future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens_cpu.tolist() == [41, 51]
    assert relay.accept_tokens is not ids


def test_passes_in_place_write_sglangs_buffers_before_another_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other pass may be over other requests, or have drafts."""
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
    algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
    future_map, slots = LastTokens(torch.device("cpu"), algorithm, pool), torch.tensor([3, 1])
    lens, ones = KnownLens(torch.tensor([40, 50]), 90, in_place=False), torch.ones(2).int()
    batch: Any = SimpleNamespace(spec_info=SimpleNamespace(future_indices=slots))
    for number in range(4):
        future_map.known = lens
        future_map.resolve_seq_lens_cpu(batch)
        batch.spec_info = relayed(torch.tensor([number, 9]), ones, lens.after.seq_lens)
        batch.spec_info.future_indices = slots
        future_map.publish(slots, lens.after.seq_lens)
        future_map.stash(slots, RelayPayload.from_ngram(batch.spec_info))
        lens = lens.after
    assert future_map.new_seq_lens_buf[3] == 41
    assert future_map.output_tokens_buf[3] == 0
    future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [44, 54]
    assert batch.spec_info.accept_tokens.tolist() == [3, 9]
    future_map.publish(slots, torch.tensor([48, 58]))
    future_map.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens.tolist() == [48, 58]


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
    """The sizes of the batches of all decisions, which hold however slow the machine is."""
    sizes, begin = list[int](), engine.leader._rounds.begin

    def counted(requests: int, **keywords: Any) -> PipelinePlan:
        sizes.append(requests)
        return begin(requests, **keywords)

    monkeypatch.setattr(engine.leader._rounds, "begin", counted)
    monkeypatch.setattr(standing, "SECONDS", math.inf)
    return sizes


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
