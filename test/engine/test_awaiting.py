"""The plugin that makes tests independent of speeds: drafts come in time however late they are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_qspec.config import MAX_COMPLETIONS, PIPELINES, QSpecConfig
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.launch import decode
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Commits, Drafted, ToSidecar
from sglang_qspec.policy import PassTimes, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from test.engine import awaiting_plugin
from test.engine.simulation import SAMPLING
from test.engine.speculating import VOCAB, connect, counting, enqueue, poll, tree_of
from test.forked import run

LATE = 500
"""Number of polls that each message of the sidecar takes, which is over 0.1 s."""


class Steps(FakeSidecarLink):
    """A sidecar that answers each commit with a step draft of three tokens."""

    def _handle(self, message: ToSidecar) -> None:
        super()._handle(message)
        for commit in message.requests if isinstance(message, Commits) else ():
            known = commit.base_len + len(commit.token_ids)
            draft = [commit.token_ids[-1] + step for step in (1, 2, 3)]
            self.inject(
                Drafted(commit.submission, MAX_COMPLETIONS, known, 0, draft, True, known_len=known)
            )


def first_pass(pipeline: str) -> int:
    """Width of the first pass of a request."""
    active = connect(Steps(vocab_size=VOCAB, delay=LATE))
    enqueue(active)
    poll(active)
    active.admit("a")
    # All that a proposer reads of SGLang's batch.
    req = SimpleNamespace(rid="a", output_ids=[8], multimodal_inputs=None)
    batch: Any = SimpleNamespace(reqs=[req], sampling_info=SAMPLING)
    proposer = Proposer(active, RuntimeSettings.of(QSpecConfig(), 8), PassTimes())
    return decode.propose(proposer, active, batch, PipelinePlan(pipeline, 8)).trees.width


def first_tree() -> int:
    """Size of the first tree of a request without step drafts."""
    active = connect(FakeSidecarLink(counting, vocab_size=VOCAB, delay=20), mode="queue")
    enqueue(active)
    active.admit("a")
    return len(tree_of(active, "a", [8], 4))


def sizes() -> list[int]:
    """The width of a first pass in each pipeline, and the size of a first tree in `queue`."""
    return [*map(first_pass, PIPELINES), first_tree()]


def installed() -> list[int]:
    awaiting_plugin.install()
    return sizes()


def test_a_pass_waits_for_the_first_drafts_of_its_requests() -> None:
    assert sizes() == [1, 1, 1, 1]
    assert run(installed) == [4, 4, 4, 4]


def test_a_held_target_runs_the_allowed_number_of_passes(tmp_path: Path) -> None:
    allowed = tmp_path / "hold"
    done, hold = awaiting_plugin.done_file(allowed), awaiting_plugin.Hold(allowed)
    assert not hold.holds(7)
    allowed.write_text("2")
    assert [hold.holds(passes) for passes in (7, 8, 9)] == [False, False, True]
    assert done.read_text() == "2"
    allowed.write_text("3")
    assert [hold.holds(passes) for passes in (9, 10)] == [False, True]
    allowed.unlink()
    assert not hold.holds(10)
    assert not done.exists()


def test_each_scheduler_of_a_held_target_runs_the_allowed_number_of_passes(tmp_path: Path) -> None:
    allowed = tmp_path / "hold"
    allowed.write_text("1")
    first, second = (awaiting_plugin.Hold(allowed, scheduler) for scheduler in (0, 1))
    assert [hold.holds(passes) for hold, passes in ((first, 7), (second, 3))] == [False, False]
    assert first.holds(8)
    done = [awaiting_plugin.done_file(allowed, scheduler) for scheduler in (0, 1)]
    assert [each.read_text() for each in done] == ["1", "0"]
    allowed.unlink()
    assert not first.holds(8)
    assert [each.exists() for each in done] == [False, True]
