"""What the decisions on a pass ask of drafts holds for a server's and for the planner's."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.engine.passes.decide import batch_end
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.decide.rounds import Rounds
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Commits, Drafted, ToSidecar
from sglang_qspec.policy import DraftUse, FirstTokens, PassTimes, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.tools.plan.clock import Clock, Signal
from sglang_qspec.tools.plan.drafts import SimulatedDrafts
from sglang_qspec.tools.plan.requests import SimulatedRequest
from sglang_qspec.tools.plan.sidecar import Sidecar
from sglang_qspec.tools.plan.trace import Arrival
from sglang_qspec.trie import DraftTrees, Source
from test.engine.speculating import VOCAB, connect, enqueue, finish_pass, poll
from test.tools.plan.examples import flat

STEPS = 3
"""Tokens of each step draft of the sidecars here."""


class Steps(FakeSidecarLink):
    """A sidecar that answers each commit with a step draft, which counts up."""

    def _handle(self, message: ToSidecar) -> None:
        super()._handle(message)
        for commit in message.requests if isinstance(message, Commits) else ():
            known = commit.base_len + len(commit.token_ids)
            draft = [commit.token_ids[-1] + step for step in range(1, STEPS + 1)]
            self.inject(
                Drafted(commit.submission, MAX_COMPLETIONS, known, 0, draft, True, known_len=known)
            )


class Case(NamedTuple):
    """Drafts of the running request "a", and what a test does with them."""

    drafts: Drafts
    outputs: Callable[[], list[list[int]]]
    """The committed output of the request."""
    receive: Callable[[], object]
    """Let all messages of the sidecar arrive; its step drafts have STEPS tokens that are right."""
    lose: Callable[[], object]
    """End the sidecar."""
    finish: Callable[[], object]
    """Let the answer to "a" reach its limit."""
    join: Callable[[], object]
    """Serve another request, "b", with a longer answer."""
    queue: Callable[[], object]
    """Let a third request wait."""

    def propose(self, width: int = 8) -> DraftTrees:
        return self.drafts.propose(["a"], self.outputs(), width)

    def drafted(self) -> DraftTrees:
        """Trees with a step draft, in a round of `ahead`."""
        self.drafts.sidecar.lookahead = STEPS
        self.propose()  # a server reports its output before each pass
        finish_pass(self.drafts, ["a"], self.propose(1), [[]], [9])
        self.receive()
        return self.propose()

    def record(self, trees: DraftTrees, accepted: int) -> None:
        """Commit a pass in which this number of draft tokens was right."""
        nodes = list(range(1, accepted + 1))
        last = int(trees.token_ids[0, accepted])
        finish_pass(self.drafts, ["a"], trees, [nodes], [last + 1])


def of_a_server() -> Case:
    link = Steps(vocab_size=VOCAB)
    active = connect(link)
    enqueue(active, max_new_tokens=40)
    active.admit("a")
    poll(active)
    active.propose(["a"], [[8]], 1)

    def outputs() -> list[list[int]]:
        live = active.live("a")
        assert live is not None
        return [list(live.output_ids)]

    def lose() -> None:
        link.die()
        poll(active)

    def finish() -> None:
        active.end("a", 40)

    def join() -> None:
        enqueue(active, "b", max_new_tokens=60)
        active.admit("b")

    def queue() -> None:
        enqueue(active, "c", max_new_tokens=40)

    return Case(active, outputs, lambda: poll(active), lose, finish, join, queue)


def of_the_planner() -> Case:
    clock, tables = Clock(), flat(1.0, step=0.001)
    sidecar = Sidecar(clock, tables, 0.0, ((1e6, 2e6),))
    server = sidecar.connect(Signal())
    drafts = SimulatedDrafts(clock, tables, server, np.random.default_rng(1))
    request = SimulatedRequest(Arrival(0.0, 3, 40), np.ones(40, dtype=np.bool_), "a")
    drafts.admit(request)
    clock.start(sidecar.run())

    def receive() -> None:
        clock.run(clock.now + 1.0)

    def lose() -> None:
        clock.run(1.5e6)

    def finish() -> None:
        while drafts.running:
            trees = drafts.propose(["a"], [()], 1)
            finish_pass(drafts, ["a"], trees, [[]], [1])

    def join() -> None:
        drafts.admit(SimulatedRequest(Arrival(0.0, 3, 60), np.ones(60, dtype=np.bool_), "b"))

    def queue() -> None:
        drafts.others_wait = True

    return Case(drafts, lambda: [[1] * request.done], receive, lose, finish, join, queue)


@pytest.fixture(params=[of_a_server, of_the_planner])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param()
    return made


def test_a_request_without_drafts_has_its_root_alone(case: Case) -> None:
    trees = case.propose()
    assert (len(trees), trees.sizes.tolist()) == (1, [1])
    assert case.drafts.running == 1


def test_step_drafts_make_trees_of_at_most_the_width_with_falling_scores(case: Case) -> None:
    trees = case.drafted()
    assert trees.sizes.tolist() == [1 + STEPS]
    assert set(trees.sources[0, 1 : 1 + STEPS].tolist()) == {Source.STEP}
    scores = trees.scores[0, 1 : 1 + STEPS].tolist()
    assert 1.0 >= scores[0] >= scores[1] >= scores[2] > 0.0
    assert not trees.scores[0, 1 + STEPS :].any()
    assert case.propose(2).sizes.tolist() == [2]
    assert case.drafts.propose(["a"], case.outputs(), 8, drafts=False).sizes.tolist() == [1]


def test_a_paused_source_gives_no_drafts(case: Case) -> None:
    case.drafted()
    case.drafts.sources.observe(Source.STEP, 100, 0, cost=1.0, trees=100)
    assert Source.STEP in case.drafts.sources.paused
    assert case.propose().sizes.tolist() == [1]


def test_a_record_commits_the_accepted_and_the_bonus_token_and_counts_both(case: Case) -> None:
    trees = case.drafted()
    before, agreement = len(case.outputs()[0]), case.drafts.totals.agreement
    case.record(trees, 2)
    assert len(case.outputs()[0]) == before + 3
    totals = case.drafts.totals
    assert (totals.proposed[Source.STEP], totals.accepted[Source.STEP]) == (STEPS, 2)
    assert totals.agreement < agreement


def test_first_tokens_that_are_wrong_lower_the_factor_of_a_request(case: Case) -> None:
    trees = case.drafted()
    assert case.drafts.factors(["a"]).tolist() == [1.0]
    right, wrong = (
        FirstTokens.of(trees, np.array([token], dtype=np.int32))
        for token in (int(trees.token_ids[0, 1]), 999)
    )
    case.drafts.update_credit(["a"], trees, wrong)
    lower = case.drafts.factors(["a"])[0]
    assert lower < 1.0
    case.drafts.update_credit(["a"], trees, right)
    assert case.drafts.factors(["a"])[0] > lower


def test_step_drafts_are_awaited_from_a_commit_to_the_end_of_the_draft(case: Case) -> None:
    assert not case.drafts.awaited(["a"], case.propose()).any()  # there is no lookahead
    case.record(case.drafted(), 0)
    assert case.drafts.sidecar.ready
    assert case.drafts.awaited(["a"], case.propose()).all()
    case.receive()
    assert not case.drafts.awaited(["a"], case.propose()).any()


def test_nothing_is_awaited_of_a_sidecar_that_is_lost(case: Case) -> None:
    case.record(case.drafted(), 0)
    assert case.drafts.sidecar.session_count == 1
    case.lose()
    assert not case.drafts.sidecar.ready
    assert not case.drafts.awaited(["a"], case.propose()).any()


def test_the_tokens_to_come_count_down(case: Case) -> None:
    trees = case.drafted()
    case.join()
    first, other = case.drafts.tokens_left(["a", "b"])
    assert first is not None
    assert other is not None
    assert other > first > 0
    case.record(trees, 2)
    assert case.drafts.tokens_left(["a", "b"]) == [first - 3, other]


def test_accepted_drafts_save_expected_passes(case: Case) -> None:
    trees = case.drafted()
    case.join()
    assert case.drafts.passes_left().keys() == {"a", "b"}
    for rid, tokens in zip("ab", case.drafts.tokens_left(["a", "b"]), strict=True):
        assert case.drafts.passes_left()[rid] == tokens
    case.record(trees, 2)
    (left,) = case.drafts.tokens_left(["a"])
    assert left is not None
    assert 0.5 * left < case.drafts.passes_left()["a"] < left


def test_a_pass_gets_as_far_as_its_last_request(case: Case) -> None:
    trees = case.drafted()
    case.record(trees, 2)
    assert batch_end.progress(case.drafts, ["a"], [[1, 2]]) == 3
    case.join()
    assert batch_end.progress(case.drafts, ["a", "b"], [[1, 2], []]) == 1
    assert batch_end.progress(case.drafts, ["b"], [[1]]) == 2


def test_requests_in_the_queue_wait(case: Case) -> None:
    case.drafted()
    assert not case.drafts.others_wait
    case.queue()
    assert case.drafts.others_wait


def test_a_request_that_follows_the_end_of_another_keeps_the_batch_going(case: Case) -> None:
    case.drafts.last_requests.end(at_limit=True)
    before = case.drafts.last_requests.certainty
    case.join()
    assert case.drafts.last_requests.certainty < before


def test_an_answer_that_reaches_its_limit_is_counted(case: Case) -> None:
    before = case.drafts.last_requests.certainty
    case.finish()
    assert case.drafts.last_requests.certainty > before


def test_requests_of_one_priority_have_passes_of_any_length(case: Case) -> None:
    case.join()
    assert case.drafts.longest_pass(["a"]) == math.inf


def test_link_seconds_are_taken_once(case: Case) -> None:
    case.drafted()
    assert case.drafts.take_link_seconds() >= 0.0
    assert case.drafts.take_link_seconds() == 0.0


def test_a_round_waits_for_the_drafts_that_come_and_learns_from_its_pass(case: Case) -> None:
    runtime = RuntimeSettings.of(QSpecConfig(mode="sequential"), 1 + STEPS)
    times = PassTimes()
    rounds = Rounds(case.drafts, runtime, times)
    plan = rounds.begin(1, splits=lambda: False)
    assert plan == PipelinePlan("sequential", 1 + STEPS)
    assert (case.drafts.totals.pipeline, case.drafts.sidecar.lookahead) == (
        "sequential",
        STEPS,
    )
    case.record(case.drafted(), 0)
    before = case.drafts.totals.accepted[Source.STEP]
    accounting = PassAccounting(case.drafts, runtime, times=times)
    accounting.begin()
    proposing = Proposer(case.drafts, runtime, times).propose(["a"], case.outputs(), plan)
    assert next(proposing) > 0.0
    case.receive()
    with pytest.raises(StopIteration) as end:
        proposing.send(True)
    proposal = end.value.value
    assert proposal.trees.sizes.tolist() == [1 + STEPS]
    accounting.record(["a"], plan.pipeline, proposal, [[1, 2, 3]], [13])
    assert case.drafts.totals.pipelines["sequential"].input_tokens == 1 + STEPS
    assert case.drafts.totals.accepted[Source.STEP] == before + STEPS


class Wide:
    """Passes of four or eight tokens of each request, as with CUDA graphs."""

    tiers = ()

    def widths(self, requests: int) -> tuple[int, ...]:
        return (4, 8)


def test_a_round_without_drafts_is_plain_whatever_widths_are_captured(case: Case) -> None:
    runtime = RuntimeSettings.of(QSpecConfig(mode="ahead"), 1 + STEPS)
    times = PassTimes()
    rounds = Rounds(case.drafts, runtime, times)
    rounds.begin(1, splits=lambda: False)
    case.drafted()
    case.receive()
    lookahead = case.drafts.sidecar.lookahead
    assert lookahead > 0
    proposer = Proposer(case.drafts, runtime, times, shapes=Wide())
    for keeps in (True, False):
        plan = rounds.begin(1, splits=lambda: False, use=DraftUse.NONE, keeps_drafting=keeps)
        assert case.drafts.sidecar.lookahead == (lookahead if keeps else 0)
        with pytest.raises(StopIteration) as end:
            next(proposer.propose(["a"], case.outputs(), plan))
        assert end.value.value.trees.width == 1
    plan = rounds.begin(1, splits=lambda: False, use=DraftUse.TEXTS)
    assert (plan.pipeline, plan.width) == ("queue", 1 + STEPS)


def test_the_decisions_import_no_sglang() -> None:
    script = (
        "import sys\n"
        "from sglang_qspec.engine.passes.decide import accounting, halves, proposer, rounds\n"
        "print({'sglang', 'transformers', 'zmq'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
