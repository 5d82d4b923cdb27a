"""A pass is settled at the right time, and only for the requests that count."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.frontend.trace import KEY, MORE, PREFILL
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.outcome import ComingOutcome, ComingTokens
from sglang_qspec.engine.passes.outputs import output_of, outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.settlement import Settlement
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.engine.passes.tracing import Items, PassTrace
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from test.engine.simulation import Clock
from test.engine.speculating import connect, enqueue

QUEUE, STEP = Source.QUEUE, Source.STEP
TREE = DraftTree((8, 9, 10), (0, 0, 1), (QUEUE, QUEUE, STEP), (1.0, 0.9, 0.8))


def output_lens(reqs: list[Req]) -> list[int]:
    return list(map(len, outputs_of(reqs)))


class Req:
    """The part of SGLang's request that a settlement reads."""

    def __init__(self, rid: str, output_ids: list[int]) -> None:
        self.rid = rid
        self.output_ids = output_ids
        self.customized_info: dict[str, Any] = {provenance.KEY: ["target"] * len(output_ids)}
        self.is_retracted = False
        self.inflight_middle_chunks = 0
        self.ended = False

    def finished(self) -> bool:
        return self.ended

    @property
    def labels(self) -> list[str]:
        labels: list[str] = self.customized_info[provenance.KEY]
        return labels


def launched_pass(reqs: list[Req], outcome: ComingOutcome | ComingTokens, result: object) -> Pass:
    batch: Any = SimpleNamespace(reqs=reqs)
    return Pass(batch, outcome=outcome, result=result)


class Engine:
    """A settlement over a speculator with the requests a and b, each with one output token."""

    def __init__(self, active: Speculator, clock: Clock, *, overlap: bool = True) -> None:
        self.clock = clock
        self.active = active
        speculation.activate(active)
        for rid in "ab":
            enqueue(active, rid, output_ids=[8])
            active.admit(rid)
        self.reqs = [Req(rid, [8]) for rid in "ab"]
        runtime: Any = active.runtime_settings
        self.accounting = PassAccounting(active, runtime, clock)
        self.settlement = Settlement(self.accounting, overlap=overlap)

    def launch(self, accepted: tuple[int, ...] = (1, 2), seconds: float = 0.5) -> object:
        """Launch a pass that accepts these nodes of each tree; its token after node i is 9 + i."""
        result = object()
        width, count = len(TREE), len(self.reqs)
        index = torch.full((count, width), -1, dtype=torch.int32)
        for row in range(count):
            index[row, : 1 + len(accepted)] = torch.tensor([0, *accepted]) + row * width
        outcome = ComingOutcome(
            torch.arange(9, 9 + width, dtype=torch.int32).repeat(count),
            torch.full((count,), 1 + len(accepted), dtype=torch.int32),
            index,
            np.arange(count) * width,
        )
        self.accounting.begin()
        trees = DraftTrees.of([TREE] * count, width)
        launched = launched_pass(self.reqs, outcome, result)
        launched.pipeline, launched.proposal = "ahead", Proposal(trees, trees)
        launched.traced = PassTrace.of(self.reqs)
        self.settlement.add(launched)
        self.clock.now += seconds
        return result

    def prefill(self, reqs: list[Req], token_id: int) -> object:
        result = object()
        token_ids = torch.full((len(reqs),), token_id, dtype=torch.int64)
        tokens = ComingTokens(SimpleNamespace(next_token_ids=token_ids), copied=False)
        self.accounting.interrupt()
        provenance.extend(reqs)
        self.settlement.add(launched_pass(reqs, tokens, result))
        return result

    def process(self, result: object, tokens: list[int]) -> None:
        """Add the tokens to the outputs, as the scheduler does when it processes the result."""
        self.settlement.settle_through(result)
        for req in self.reqs:
            if not (req.ended or req.is_retracted):
                req.output_ids = [*req.output_ids, *tokens]

    def committed(self, rid: str) -> list[int]:
        return self.active._live[rid].output_ids


@pytest.fixture
def engine(link: FakeSidecarLink, clock: Clock) -> Iterator[Engine]:
    yield Engine(connect(link, clock), clock)
    speculation.deactivate()


def test_a_pass_is_settled_before_sglang_adds_its_tokens(engine: Engine) -> None:
    result = engine.launch()
    assert engine.committed("a") == [8]
    engine.settlement.settle()
    assert [list(output_of(req)) for req in engine.reqs] == [[8, 9, 10, 11]] * 2
    assert engine.committed("a") == [8, 9, 10, 11]
    # Labels and counts follow behind the launch of the next pass.
    assert engine.reqs[0].labels == ["target"]
    assert engine.active.totals.accepted[STEP] == 0
    engine.process(result, [9, 10, 11])
    assert list(output_of(engine.reqs[0])) == [8, 9, 10, 11]
    assert engine.reqs[0].labels == ["target", "queue", "step", "target"]
    assert engine.active.totals.accepted[STEP] == 2


def test_two_passes_in_a_row_count_from_the_end_of_the_last(engine: Engine) -> None:
    """SGLang processes the first result when the second pass has been launched."""
    first = engine.launch()
    engine.settlement.settle()
    second = engine.launch((), seconds=0.25)
    engine.process(first, [9, 10, 11])
    assert engine.reqs[0].labels == ["target", "queue", "step", "target"]
    engine.settlement.settle()
    assert list(output_of(engine.reqs[0])) == [8, 9, 10, 11, 9]
    engine.process(second, [9])
    assert engine.reqs[0].labels == ["target", "queue", "step", "target", "target"]
    assert engine.committed("b") == [8, 9, 10, 11, 9]
    assert engine.active.totals.pipelines["ahead"].seconds == pytest.approx(0.75)


def test_the_last_pass_is_settled_when_its_result_is_processed(engine: Engine) -> None:
    first = engine.launch()
    second = engine.prefill([Req("c", [])], 4)
    engine.process(first, [9, 10, 11])
    assert engine.committed("a") == [8, 9, 10, 11]
    assert len(engine.settlement._pending) == 1
    engine.settlement.settle_through(first)  # again: nothing happens
    engine.settlement.settle_through(second)
    assert not engine.settlement._pending


def test_a_prefills_token_is_spliced_until_its_result_is_processed(engine: Engine) -> None:
    new, chunked, kept = Req("c", []), Req("d", []), Req("e", [])
    chunked.inflight_middle_chunks = 1
    result = engine.prefill([new, chunked], 4)
    engine.settlement.settle()
    assert [list(output_of(req)) for req in (new, chunked, kept)] == [[4], [], []]
    new.output_ids = [4]
    engine.settlement.settle_through(result)
    assert list(output_of(new)) == [4]


def test_tokens_of_an_earlier_pass_are_dropped_with_the_next(engine: Engine) -> None:
    """SGLang does not add the tokens of a pass to the output of a request that it retracts."""
    engine.launch()
    engine.settlement.settle()
    assert list(output_of(engine.reqs[0])) == [8, 9, 10, 11]
    other = Req("c", [])
    engine.prefill([other], 4)
    engine.settlement.settle()
    assert [list(output_of(req)) for req in (*engine.reqs, other)] == [[8], [8], [4]]


def test_a_prefill_whose_requests_are_gone_has_nothing_to_record(engine: Engine) -> None:
    for rid in "ab":
        engine.active.end(rid)
    trees = DraftTrees.of([], len(TREE))
    engine.accounting.record_prefill([], Proposal(trees, trees), [], [])
    engine.active.check_integrity()


def test_a_result_that_was_processed_first_is_not_spliced_again(engine: Engine) -> None:
    """With a grammar SGLang processes a result before it launches the next pass."""
    engine.process(engine.launch(), [9, 10, 11])
    engine.settlement.settle()
    assert [list(output_of(req)) for req in engine.reqs] == [[8, 9, 10, 11]] * 2
    assert output_lens(engine.reqs) == [4, 4]


@pytest.mark.parametrize("change", [{"ended": True}, {"is_retracted": True}])
def test_a_request_that_drops_the_tokens_of_a_pass_does_not_count(
    engine: Engine, change: dict[str, bool]
) -> None:
    engine.launch()
    gone = engine.reqs[0]
    vars(gone).update(change)
    engine.settlement.settle()
    engine.settlement.account()
    assert engine.committed("a") == [8]
    assert engine.committed("b") == [8, 9, 10, 11]
    assert gone.labels == ["target"]
    assert list(output_of(gone)) == [8]
    totals = engine.active.totals
    assert (totals.accepted[QUEUE], totals.accepted[STEP]) == (1, 1)
    # The target still took the time of a pass over two requests.
    assert totals.pipelines["ahead"].requests == 2
    assert totals.pipelines["ahead"].seconds == pytest.approx(0.5)


def test_a_pass_whose_requests_are_all_gone_counts_only_its_time(engine: Engine) -> None:
    engine.launch()
    for req in engine.reqs:
        req.ended = True
    engine.settlement.settle()
    assert speculation.active() is engine.active
    assert sum(engine.active.totals.accepted.values()) == 0
    assert engine.active.totals.pipelines["ahead"].passes == 1


def test_a_pass_that_a_prefill_followed_has_no_measured_time(engine: Engine) -> None:
    for _ in range(3):
        engine.launch()
        engine.settlement.settle()
    known = engine.accounting.times.seconds(2, len(TREE))
    result = engine.launch(seconds=99.0)
    engine.prefill([Req("c", [])], 4)
    engine.process(result, [])
    assert engine.accounting.times.seconds(2, len(TREE)) == known
    assert engine.active.totals.pipelines["ahead"].seconds == pytest.approx(1.5 + known)


def test_a_trace_counts_the_whole_pass_but_only_the_tokens_that_a_request_takes(
    engine: Engine,
) -> None:
    for req in engine.reqs:
        req.customized_info[KEY] = Items([PREFILL])
    engine.launch()
    engine.reqs[0].ended = True
    engine.settlement.settle()
    engine.settlement.account()
    prefill, described, *more = engine.reqs[1].customized_info[KEY]
    assert (prefill, more) == (PREFILL, [MORE, MORE])
    numbers = described["pass"]
    assert (numbers["rows"], numbers["batch_requests"], numbers["batch_rows"]) == (3, 2, 6)
    assert numbers["pipeline"] == "ahead"
    assert described["path"] == [0, 1]
    assert engine.reqs[0].customized_info[KEY] == [PREFILL]


def test_the_drafts_that_a_prefill_accepted_are_in_no_pass(engine: Engine) -> None:
    req = engine.reqs[0]
    req.customized_info[KEY] = Items()
    req.output_ids = []
    engine.launch()
    (pending,) = engine.settlement._pending
    pending.pipeline = ""  # a prefill
    engine.settlement.settle()
    engine.settlement.account()
    assert req.customized_info[KEY] == [PREFILL] * 3


def test_without_overlap_nothing_is_spliced(link: FakeSidecarLink, clock: Clock) -> None:
    engine = Engine(connect(link, clock), clock, overlap=False)
    engine.launch()
    engine.settlement.settle()
    assert engine.committed("a") == [8, 9, 10, 11]
    assert [list(output_of(req)) for req in engine.reqs] == [[8], [8]]
    speculation.deactivate()


def test_an_error_in_the_counts_costs_neither_tokens_nor_labels(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(engine.active, "commit", fail)
    engine.launch()
    engine.settlement.settle()
    engine.settlement.account()
    assert speculation.active() is None
    assert [list(output_of(req)) for req in engine.reqs] == [[8, 9, 10, 11]] * 2
    assert engine.reqs[0].labels == ["target", "queue", "step", "target"]
