"""An exception in the loop has the right consequences, and a failed pass leaves no state."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_qspec.errors import DraftModelError, PromptError
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Rest,
    Submit,
    ToSidecar,
)
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.loop import MAX_FAILURES, serve
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel

POISON = 990
"""A token that makes every pass over it fail."""


class Scripted:
    """A link with scripted messages; it ends the loop when all are read and the drafter is idle."""

    def __init__(self, drafter: Drafter, *messages: tuple[Peer, ToSidecar]) -> None:
        self.drafter = drafter
        self.coming = deque(messages)
        self.sent: list[tuple[Peer, FromSidecar]] = []
        self.rounds = 0

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]:
        self.rounds += 1
        return [self.coming.popleft()] if self.coming else []

    def departed(self) -> list[Peer]:
        return []

    def send(self, peer: Peer, message: FromSidecar) -> bool:
        self.sent.append((peer, message))
        return True

    def over(self) -> bool:
        assert self.rounds < 5000, "the loop does not come to an end"
        return not self.coming and self.rounds > 0 and self.drafter.idle

    def run(self) -> None:
        serve(self.drafter, self, self.over)

    def told(self, peer: Peer, number: int) -> list[int]:
        """The tokens of a submission's first completion."""
        drafts = [m for p, m in self.sent if p == peer and isinstance(m, Drafted)]
        mine = [d for d in drafts if (d.submission, d.completion) == (number, 0)]
        return [token for drafted in mine for token in drafted.token_ids]

    def declined(self) -> list[tuple[Peer, int]]:
        return [(p, m.submission) for p, m in self.sent if isinstance(m, Declined)]


def submit(number: int, token_ids: list[int]) -> Submit:
    return Submit(number, token_ids, 0, 6, 2, 0.6)


def single(number: int) -> Submit:
    return Submit(number, [number, 1], 0, 60, 1, 0.6)


class Fragile(ScriptedModel):
    """A model that fails on POISON after it has taken KV, as a failure on a device does."""

    def _say(self, sequences: Any) -> torch.Tensor:
        if any(POISON in sequence for sequence in sequences):
            raise RuntimeError("injected failure")
        return super()._say(sequences)


class Dead(ScriptedModel):
    """A model on a device that has failed for good."""

    def _say(self, sequences: Any) -> torch.Tensor:
        raise RuntimeError("injected failure")


class FailsTogether(ScriptedModel):
    """A model that fails in every pass over several rows."""

    def _say(self, sequences: Any) -> torch.Tensor:
        if len(sequences) > 1:
            raise RuntimeError("injected failure")
        return super()._say(sequences)


class Paced(Scripted):
    """A link that gives at most one message a round; None stands for none."""

    def __init__(self, drafter: Drafter, *rounds: tuple[Peer, ToSidecar] | Peer | None) -> None:
        """A `Peer` alone is one that has gone by then."""
        super().__init__(drafter)
        self.script = deque(rounds)
        self.gone: list[Peer] = []
        self.drafted: list[int] = []
        """Number of tokens drafted before each round."""
        self.waits: list[bool] = []
        """Whether each round waits for messages."""

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]:
        self.drafted.append(self.drafter.statistics.drafted_tokens)
        self.waits.append(timeout_ms > 0)
        item = self.script.popleft()
        if isinstance(item, Peer):
            self.gone.append(item)
            return []
        return [] if item is None else [item]

    def departed(self) -> list[Peer]:
        gone, self.gone = self.gone, []
        return gone

    def over(self) -> bool:
        return not self.script

    @property
    def passes(self) -> list[bool]:
        """Whether tokens were drafted in each round but the last one."""
        return [after > before for before, after in pairwise(self.drafted)]


def test_no_pass_runs_while_the_server_lets_the_sidecar_rest() -> None:
    wire = Paced(
        Drafter(ScriptedModel()),
        *((ONE, single(1)), None, (ONE, Rest(True)), None, (ONE, single(2)), None),
        *((ONE, Rest(False)), None, None),
    )
    wire.run()
    assert wire.passes == [True, True, False, False, False, False, True, True]
    assert wire.waits == [True, False, False, True, True, True, True, False, False]
    assert wire.told(ONE, 2), "it has read the messages"


def test_a_server_that_does_not_rest_keeps_the_sidecar_awake_until_it_has_gone() -> None:
    wire = Paced(
        Drafter(ScriptedModel()),
        *((ONE, single(1)), (ONE, Rest(True)), None, (TWO, single(1)), None, TWO, None),
        *((TWO, Rest(True)), (TWO, Rest(False)), TWO, None, ONE, (TWO, single(3)), None),
    )
    wire.run()
    expected = [True, False, False, True, True, False, False]
    assert wire.passes == [*expected, False, True, False, False, False, True]


def test_failing_prompts_do_not_end_the_process_however_many() -> None:
    drafter = Drafter(Fragile())
    bad = [(ONE, submit(number, [POISON, number])) for number in range(20)]
    wire = Scripted(drafter, *bad, (TWO, submit(1, [50, 51])))
    wire.run()
    assert wire.declined() == [(ONE, number) for number in range(20)]
    assert wire.told(TWO, 1) == list(range(52, 58))
    drafter.check_integrity()


def test_a_prompt_that_fails_after_its_first_chunk_is_found_too() -> None:
    """Its first passes succeed alone; the other prompts must not lose their KV to it repeatedly."""
    drafter = Drafter(Fragile(), prefill_tokens=8)
    long = [*range(100, 140), POISON, 5]
    wire = Scripted(
        drafter,
        (ONE, submit(1, long)),
        *((TWO, submit(number, [50 * number, 1])) for number in range(1, 5)),
    )
    wire.run()
    assert wire.declined() == [(ONE, 1)]
    assert all(len(wire.told(TWO, number)) == 6 for number in range(1, 5))
    assert wire.rounds < 100


def test_passes_that_fail_only_together_end_the_process() -> None:
    drafter = Drafter(FailsTogether())
    wire = Scripted(drafter, *((ONE, single(number)) for number in range(1, 30)))
    with pytest.raises(DraftModelError, match="in a row"):
        wire.run()


def test_a_prompt_that_fails_every_pass_is_declined_and_no_other() -> None:
    drafter = Drafter(Fragile())
    wire = Scripted(
        drafter,
        (ONE, submit(1, [1, 2, 3])),
        (ONE, submit(2, [40, POISON])),
        (TWO, submit(1, [50, 51])),
        (TWO, submit(2, [60, 61])),
    )
    wire.run()
    assert wire.declined() == [(ONE, 2)]
    assert wire.told(ONE, 1) == list(range(4, 10))
    assert wire.told(TWO, 1) == list(range(52, 58))
    assert wire.told(TWO, 2) == list(range(62, 68))
    drafter.check_integrity()


def test_the_kv_of_a_failed_pass_is_never_reused() -> None:
    """The slot of POISON was taken and never computed; a later prompt has the same prefix."""
    prompt = list(range(100, 130))
    model = Fragile()
    driver = DrafterDriver(model)
    driver.submit("a", prompt)
    driver.step(2)
    model.failures.append(DraftModelError("injected failure"))
    with pytest.raises(DraftModelError):
        driver.step()
    driver.drafter.check_integrity()
    assert model.rows.free_slots == model.rows.total_slots  # the failed pass keeps no KV
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(130, 140))
    driver.submit("poisoned", [*prompt, POISON, 5])
    with pytest.raises(RuntimeError):
        driver.step()
    with pytest.raises(PromptError):
        driver.step()
    driver.collect()
    assert "failed" in driver.declined["poisoned"]
    driver.submit("b", [*prompt, 7])
    driver.run()
    assert driver.told[ONE, "b", 0] == list(range(8, 18))
    driver.leave("a", "b")


def test_a_failing_step_draft_declines_only_its_request() -> None:
    driver = DrafterDriver(Fragile())
    for rid in "ab":
        driver.submit(rid, [1, 2, 3] if rid == "a" else [4, 5, 6])
    driver.run()
    driver.admit("a")
    driver.admit("b")
    driver.commit("a", 0, [POISON])
    driver.commit("b", 0, [50])
    with pytest.raises(RuntimeError):
        driver.step()
    with pytest.raises(PromptError):
        driver.step()
    driver.run()
    assert list(driver.declined) == ["a"]
    assert driver.told[ONE, "b", 64] == list(range(51, 61))
    driver.leave("b")


def test_a_dead_device_ends_the_process_after_a_few_passes_and_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = Drafter(Dead())
    messages = [(ONE, submit(number, [7, number])) for number in range(40)]
    wire = Scripted(drafter, *messages)
    with caplog.at_level(logging.WARNING), pytest.raises(DraftModelError, match="in a row"):
        wire.run()
    assert wire.rounds <= MAX_FAILURES + 1
    assert len(caplog.records) <= 2
    drafter.check_integrity()


def test_an_error_while_handling_a_message_declines_only_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Drafter(ScriptedModel())
    failing: Callable[..., None] = drafter._follow

    def follow(subscriber: object, prompt: object, commit: Commit, *, draft: object) -> None:
        if commit.token_ids == [7]:
            raise IndexError("injected failure")
        failing(subscriber, prompt, commit, draft=draft)

    monkeypatch.setattr(drafter, "_follow", follow)
    wire = Scripted(
        drafter,
        (ONE, submit(1, [1, 2, 3])),
        (TWO, submit(1, [11, 12])),
        (TWO, Commits([Commit(1, 0, [7], 4)])),
        (ONE, Commits([Commit(1, 0, [50], 4)])),
        (ONE, Close(9)),
    )
    wire.run()
    assert wire.declined() == [(TWO, 1)]
    assert any(isinstance(m, Drafted) and m.completion == 64 for _, m in wire.sent)
    drafter.check_integrity()


def test_an_empty_prompt_is_declined_and_an_empty_commit_ignored() -> None:
    """If the loop accepted either message, the model would run a pass over no tokens."""
    drafter = Drafter(ScriptedModel())
    wire = Scripted(
        drafter,
        (ONE, Submit(1, [], 0, 8, 0, 0.6)),
        (ONE, Commits([Commit(1, 0, [], 8)])),
        (TWO, submit(1, [1, 2, 3])),
        (TWO, Commits([Commit(1, 0, [], 8)])),
    )
    wire.run()
    assert wire.declined() == [(ONE, 1)]
    assert wire.told(TWO, 1) == list(range(4, 10))


class Busy:
    """A drafter and its link in simulated time: passes take longer than the messages of a pass."""

    PASS_S, MESSAGE_S, COMING = 0.2, 0.005, 20

    def __init__(self) -> None:
        self.now = 0.0
        self.passes = self.handled = self.sent = 0
        self.idle = False
        self.retries: list[object] = []
        self.overload = SimpleNamespace(look=lambda: None)

    def monotonic(self) -> float:
        return self.now

    def receive(self, timeout_ms: int) -> list[tuple[Any, Any]]:
        found = [(ONE, None)] * (self.COMING * (self.passes + 1) - self.sent)
        self.sent += len(found)
        return found

    def departed(self) -> list[Peer]:
        return []

    def handle(self, peer: Peer, message: object) -> None:
        self.now += self.MESSAGE_S
        self.handled += 1

    def step(self, ends: Any) -> None:
        self.now += self.PASS_S
        self.passes += 1

    def take(self) -> list[Any]:
        return []


def test_messages_do_not_pile_up_while_passes_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: Any = Busy()
    monkeypatch.setattr("sglang_qspec.sidecar.loop.time", busy)
    serve(busy, busy, lambda: busy.passes >= 50)
    assert busy.COMING * busy.passes - busy.handled <= busy.COMING
