"""Every fault of a sidecar, message by message, at random moments under load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.launch import decode
from sglang_qspec.engine.sidecar.client import STREAMS_PER_SUBMISSION
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Drafted, FromSidecar
from sglang_qspec.policy import PassTimes, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from test.engine.chaos import Chaos
from test.engine.simulation import SAMPLING
from test.engine.speculating import VOCAB, connect, enqueue, poll, tree_of

SEEDS = 200
STEPS = 200
BLOCKS = 10


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_request_finishes_with_the_targets_text_whatever_the_sidecar_does(block: int) -> None:
    finished = 0
    for seed in range(block, SEEDS, BLOCKS):
        chaos = Chaos(seed)
        for _ in range(STEPS):
            chaos.step()
        chaos.calm()
        assert all(request.output_ids == request.text for request in chaos.finished), seed
        described = chaos.active.describe()
        assert described["live_requests"] == described["trie_tokens"] == 0, seed
        finished += len(chaos.finished)
    assert finished > 5 * SEEDS // BLOCKS


@pytest.mark.parametrize("seed", range(5))
def test_a_good_sidecars_drafts_are_accepted_again_after_the_chaos(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(STEPS):
        chaos.step()
    chaos.calm()
    before = chaos.active.describe()["accepted_tokens"]
    begun = len(chaos.finished)
    for _ in range(8):
        chaos.enqueue()
    chaos.drain()
    after = chaos.active.describe()["accepted_tokens"]
    tokens = sum(len(request.text) for request in chaos.finished[begun:])
    earned = sum(after[source] - before[source] for source in ("queue", "step"))
    assert earned > tokens / 2


def test_the_chaos_has_faults_of_every_kind() -> None:
    """Without them the tests above would prove little."""
    totals: dict[str, int] = {}
    for seed in range(40):
        chaos = Chaos(seed)
        for _ in range(STEPS):
            chaos.step()
        described = chaos.active.describe()
        for name in ("accepted_tokens", "refused_chunks", "dropped_messages"):
            for key, count in described[name].items():
                totals[key] = totals.get(key, 0) + count
        totals["evictions"] = totals.get("evictions", 0) + described["evictions"]
        totals["generations"] = totals.get("generations", 0) + chaos.link.session_count
    expected = ("queue", "step", "guess", "prompt", "output", "ahead", "gap", "conflict", "full")
    others = ("evictions", "malformed", "to_sidecar", "generations")
    assert all(totals[name] > 0 for name in (*expected, *others)), sorted(totals.items())


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(vocab_size=VOCAB)


@pytest.fixture
def active(link: FakeSidecarLink) -> Speculator:
    """Request "a" waits, and the sidecar was asked for two completions."""
    active = connect(link, completions=2)
    enqueue(active, prompt_ids=[5, 6], max_new_tokens=100)
    return active


def tokens_at(active: Speculator, output_ids: list[int]) -> tuple[int, ...]:
    """The tokens of the tree after the next poll."""
    active.poll()
    return tree_of(active, "a", output_ids, 8).token_ids


@pytest.mark.parametrize(
    "completion", [2, MAX_COMPLETIONS - 1, STREAMS_PER_SUBMISSION, (1 << 31) - 1]
)
def test_a_completion_that_was_not_requested_is_dropped(
    active: Speculator, link: FakeSidecarLink, completion: int
) -> None:
    link.inject(Drafted(1, completion, 0, 0, [8, 9, 10], True))
    assert tokens_at(active, [8]) == (8,)
    assert active.describe()["requests_in_flight"] == 1
    link.inject(Drafted(1, 1, 0, 0, [8, 9, 10]))
    assert tokens_at(active, [8]) == (8, 9, 10)


def test_a_completion_finishes_once_however_often_the_sidecar_says_so(
    active: Speculator, link: FakeSidecarLink
) -> None:
    for _ in range(3):
        link.inject(Drafted(1, 0, 0, 0, [8, 9], True))
    active.poll()
    assert active.describe()["requests_in_flight"] == 1
    link.inject(Drafted(1, 1, 0, 0, [8, 9], True))
    active.poll()
    assert active.describe()["requests_in_flight"] == 0


def test_a_message_that_was_sent_before_drafts_were_dropped_is_ignored(
    active: Speculator, link: FakeSidecarLink
) -> None:
    link.inject(Drafted(1, 0, 0, 0, [8, 9, 10]))
    active.drop_drafts()
    assert tokens_at(active, [8]) == (8,)


def test_useless_step_drafts_do_not_grow_a_trie(active: Speculator, link: FakeSidecarLink) -> None:
    for number in range(5000):
        link.inject(Drafted(1, MAX_COMPLETIONS + number, 0, 0, [8 + number % 7]))
        link.inject(Drafted(1, MAX_COMPLETIONS + number, 0, 5, []))
        active.poll()
    assert active.describe()["trie_tokens"] <= 256 + 2
    assert set(tokens_at(active, [8])) == {8}


class Flood(FakeSidecarLink):
    """A sidecar that has an empty step draft at each poll, up to 100,000."""

    left = 100_000

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        if self.left and self.submits:
            self.left -= 1
            self.inject(Drafted(self.submits[-1].submission, MAX_COMPLETIONS, 0, 0, []))
        return super().receive(limit)


@pytest.mark.parametrize("pipeline", ["ahead", "sequential", "halves"])
def test_a_flood_of_empty_step_drafts_does_not_delay_a_pass(pipeline: str) -> None:
    link = Flood(vocab_size=VOCAB)
    active = connect(link)
    enqueue(active, max_new_tokens=100)
    poll(active)
    runtime_settings = RuntimeSettings.of(QSpecConfig(), 8)
    proposer = Proposer(active, runtime_settings, PassTimes())
    # All that a proposer reads of SGLang's batch.
    req = SimpleNamespace(rid="a", output_ids=[8], multimodal_inputs=None)
    batch: Any = SimpleNamespace(reqs=[req], sampling_info=SAMPLING)
    before = link.left
    assert decode.propose(proposer, active, batch, PipelinePlan(pipeline, 8)).trees.width == 1
    assert 0 < link.left < before
