"""A sidecar that is too slow for several servers leaves out work, the least useful first."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Admit, Declined, Drafted, OverloadLevel, Submit
from sglang_qspec.sidecar.draft_queue import PROMPTS_AHEAD
from sglang_qspec.sidecar.overload import LOOK_S, RETRY_AFTER_S
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel

PASS_S = 0.1
BACKLOG_S = 5.0


class Busy(DrafterDriver):
    """A drafter with two slots, whose pass takes PASS_S on the test's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 0.0
        model = ScriptedModel()
        limits = {"slots": 2, "max_backlog_s": BACKLOG_S, **options}
        super().__init__(model, clock=lambda: self.now, **limits)
        self.refusals: list[Declined] = []
        self.ended: dict[tuple[Peer, str, int], int] = {}
        """Length of each finished completion."""
        monkeypatch.setattr("sglang_qspec.sidecar.pass_runner.time.monotonic", lambda: self.now)
        model.on_pass = self._spend

    def _spend(self, tokens: int) -> None:
        self.now += PASS_S

    def collect(self) -> None:
        taken = self.drafter.take()
        for peer, message in taken:
            self.drafter._outbox.add(peer, message)
        super().collect()
        for peer, message in taken:
            if isinstance(message, Declined):
                self.refusals.append(message)
            elif isinstance(message, Drafted) and message.finished:
                name = (peer, self._names[message.submission], message.completion)
                self.ended[name] = len(self.told[name])

    def queue(self, name: str, count: int, peer: Peer = ONE, **options: Any) -> list[str]:
        """Submit `count` requests with different prompts."""
        rids = [f"{name}{number}" for number in range(count)]
        for rid in rids:
            number = self.number(rid)
            asked = {"completions": 8, "max_new_tokens": 40, **options}
            self.submit(rid, [number % 900, number // 900, 7], peer=peer, **asked)
        return rids

    def serve(self, rids: list[str], peer: Peer = ONE, *, every_s: float, seconds: float) -> None:
        """Draft for `seconds` while the target takes one request from its queue `every_s`."""
        end, due = self.now + seconds, self.now
        while self.now < end:
            if rids and self.now >= due:
                self.drafter.admit(peer, Admit(self.number(rids.pop(0))))
                due += every_s
            if self.drafter.idle:
                self.now += PASS_S
            else:
                self.drafter.step()
                self.collect()
            self.drafter.overload.look()
        self.drafter.check_integrity()

    @property
    def level(self) -> int:
        return self.drafter.overload.level


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Busy:
    return Busy(monkeypatch)


def test_the_backlog_is_the_time_for_step_drafts_and_first_completions(busy: Busy) -> None:
    assert busy.drafter.overload.backlog_s == 0
    busy.queue("a", 10, completions=1, max_new_tokens=20)
    busy.step(100)
    # Two rows of 0.1 s make at most 20 tokens a second; a prefill makes two passes of some steps.
    drafted = busy.drafter.statistics.drafted_tokens
    expected = (200 - drafted) / (drafted / busy.now)
    assert busy.drafter.overload.backlog_s == pytest.approx(expected, rel=0.2)
    busy.run()
    assert busy.drafter.overload.backlog_s == 0


def test_further_completions_and_served_requests_are_no_backlog(busy: Busy) -> None:
    (rid, *_) = busy.queue("a", 1)
    while (ONE, rid, 0) not in busy.ended:
        busy.step()
    assert not busy.drafter.idle
    assert busy.drafter.overload.backlog_s == 0
    (rid,) = busy.queue("b", 1)
    assert busy.drafter.overload.backlog_s > 0
    busy.admit(rid)
    assert busy.drafter.overload.backlog_s == 0


def test_a_long_queue_counts_in_proportion(busy: Busy) -> None:
    busy.queue("warm", 1, completions=1)
    busy.run()
    busy.queue("a", PROMPTS_AHEAD, completions=1)
    backlog_s = busy.drafter.overload.backlog_s
    busy.queue("b", 3 * PROMPTS_AHEAD, completions=1)
    assert busy.drafter.overload.backlog_s == pytest.approx(4 * backlog_s)


def test_a_single_server_loses_nothing_however_slow_the_sidecar_is(busy: Busy) -> None:
    """It takes ten requests a second, and the drafter completes less than one."""
    rids = busy.queue("a", 150, completions=2)
    busy.serve(rids, every_s=0.1, seconds=10)
    assert busy.level == OverloadLevel.NONE
    assert busy.drafter.overload.backlog_s > BACKLOG_S
    assert not busy.refusals
    assert busy.drafter.overload.left_out == 0


def test_a_long_queue_of_a_slow_target_is_no_overload(busy: Busy) -> None:
    """Both targets together take a request in 5 s, and the drafter needs about 2 s for one."""
    one, two = busy.queue("a", 80), busy.queue("b", 80, TWO)
    for _ in range(6):
        busy.serve(one, every_s=10, seconds=10)
        busy.serve(two, TWO, every_s=10, seconds=10)
    assert busy.drafter.overload.backlog_s > BACKLOG_S
    assert busy.level == OverloadLevel.NONE
    assert busy.drafter.overload.left_out == 0


def test_a_short_backlog_is_no_overload(busy: Busy) -> None:
    busy.queue("b", 1, TWO, max_new_tokens=200)
    for number in range(40):
        rids = busy.queue(f"a{number}-", 2, completions=1, max_new_tokens=8)
        busy.serve(rids, every_s=0.1, seconds=1)
    assert busy.level == OverloadLevel.NONE


def overloaded(busy: Busy, level: OverloadLevel) -> list[str]:
    """Bring the drafter to a level: TWO has little work, and ONE takes ten requests a second."""
    rids = busy.queue("a", 300, completions=2)
    busy.queue("light", 1, TWO, max_new_tokens=100)
    for _ in range(60):
        busy.serve(rids, every_s=0.1, seconds=LOOK_S)
        if busy.level >= level:
            return rids
    raise AssertionError(f"the level is {busy.level}")


def test_the_level_rises_by_one_a_second_and_falls_when_the_load_ends(busy: Busy) -> None:
    rids = overloaded(busy, OverloadLevel.SERVED)
    assert busy.level == OverloadLevel.SERVED
    busy.serve(rids, every_s=0.1, seconds=10 * LOOK_S)
    assert busy.level == OverloadLevel.DECLINE
    for rid in [name for name in busy._names if name.startswith("a")]:
        busy.close(rid)
    busy.now += LOOK_S
    busy.drafter.overload.look()
    assert busy.level == OverloadLevel.SHORT
    busy.now += 60
    busy.drafter.overload.look()
    assert busy.level == OverloadLevel.NONE


def force(busy: Busy, level: OverloadLevel, *late: Peer) -> None:
    """Set the level, which lasts while the clock stands."""
    busy.drafter.overload.level = level
    busy.drafter.overload._late = frozenset(late)


def test_the_first_level_ends_the_completions_of_served_requests_only(busy: Busy) -> None:
    served, waiting = busy.queue("a", 2)
    busy.step(3)
    busy.admit(served)
    force(busy, OverloadLevel.SERVED)
    busy.run()
    assert all(busy.ended[ONE, waiting, number] == 40 for number in range(8))
    assert all(busy.ended[ONE, served, number] < 40 for number in range(8))
    assert busy.drafter.overload.left_out == 8
    busy.leave(served, waiting)


@pytest.mark.parametrize(
    ("level", "kept"), [(OverloadLevel.HALF, 4), (OverloadLevel.FIRST, 1), (OverloadLevel.NONE, 8)]
)
def test_the_next_levels_end_further_completions(
    busy: Busy, level: OverloadLevel, kept: int
) -> None:
    rids = busy.queue("a", 3)
    force(busy, level)
    busy.run()
    for rid in rids:
        lengths = [busy.ended[ONE, rid, number] for number in range(8)]
        assert lengths[:kept] == [40] * kept
        assert max(lengths[kept:], default=0) <= 1  # all begin with the prefill of the prompt
    busy.leave(*rids)


def test_first_completions_become_shorter_only_for_servers_that_are_too_fast(busy: Busy) -> None:
    (a,) = busy.queue("a", 1)
    (b,) = busy.queue("b", 1, TWO)
    force(busy, OverloadLevel.SHORT, ONE)
    busy.run()
    assert 20 <= busy.ended[ONE, a, 0] <= 21
    assert busy.ended[TWO, b, 0] == 40
    busy.leave(a)


def test_step_drafts_are_never_left_out(busy: Busy) -> None:
    (a,) = busy.queue("a", 1)
    busy.step(2)
    busy.admit(a)
    force(busy, OverloadLevel.DECLINE, ONE)
    for number in range(3):
        busy.commit(a, number, [500 + 10 * number], max_new_tokens=8)
        busy.run()
        draft = busy.told[ONE, a, MAX_COMPLETIONS + number]
        assert draft == list(range(501 + 10 * number, 509 + 10 * number))
    busy.leave(a)


def test_the_last_level_declines_what_is_far_back_in_the_queue_of_a_fast_server(
    busy: Busy,
) -> None:
    rids = busy.queue("a", PROMPTS_AHEAD)
    force(busy, OverloadLevel.DECLINE, ONE)
    busy.submit("late", [1, 2, 3], rank=(0, 0))
    busy.submit("urgent", [1, 2, 4], rank=(-1, 0))
    busy.submit("steps", [1, 2, 5], completions=0)
    busy.submit("equal", [0, 0, 7], completions=8, max_new_tokens=40)  # drafted already
    busy.submit("other", [1, 2, 3], peer=TWO)
    assert list(busy.declined) == ["late"]
    (refusal,) = busy.refusals
    assert refusal.retry
    assert refusal.retry_after_s == RETRY_AFTER_S
    assert refusal.reason.startswith("overload")
    assert busy.drafter.declined == 1
    # The number of a declined submission can be used again once there is room.
    busy.close(rids.pop())
    busy.close(rids.pop())
    busy.submit("late", [1, 2, 3])
    assert len(busy.refusals) == 1
    busy.leave(*rids, "late", "urgent", "steps", "equal")


def test_a_light_server_keeps_its_first_completion_beside_a_fast_one(busy: Busy) -> None:
    rids = overloaded(busy, OverloadLevel.FIRST)
    busy.submit("new", [3, 3, 3], peer=TWO, completions=4, max_new_tokens=30)
    busy.serve(rids, every_s=0.1, seconds=40)
    assert busy.ended[TWO, "new", 0] == 30
    assert max(busy.ended[TWO, "new", number] for number in (1, 2, 3)) < 30


def test_more_requests_get_a_draft_in_time_than_without_overload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TWO asks for many completions; ONE has more requests than its half of the drafter serves."""

    def in_time(max_backlog_s: float) -> int:
        """Number of ONE's requests that have ten draft tokens when the target serves them."""
        with monkeypatch.context() as patch:
            busy = Busy(patch, max_backlog_s=max_backlog_s)
            busy.queue("light", 2, TWO, max_new_tokens=100)
            rids = busy.queue("a", 100, completions=1, max_new_tokens=20)
            count = 0
            for rid in rids[:60]:
                busy.serve([rid], every_s=1, seconds=1)
                count += len(busy.told[ONE, rid, 0]) >= 10
            return count

    assert in_time(BACKLOG_S) > 1.3 * in_time(86400)


def test_a_server_that_has_gone_leaves_no_trace(busy: Busy) -> None:
    overloaded(busy, OverloadLevel.SERVED)
    for peer in (ONE, TWO):
        busy.drafter.drop(peer)
    busy.drafter.check_integrity()
    assert not busy.drafter.overload._lines
    assert not busy.drafter.overload._late
    assert busy.drafter.overload.backlog_s == 0


def test_a_submission_with_a_known_number_is_counted_once(busy: Busy) -> None:
    message = Submit(1, [1, 2, 3], 0, 10, 2, 0.6)
    for _ in range(3):
        busy.drafter.submit(ONE, message)
    busy.drafter.check_integrity()
    assert busy.drafter.overload._lines[ONE].waiting == 1
