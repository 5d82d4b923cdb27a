"""A draft token is judged when the target commits the output at its place."""

from __future__ import annotations

import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.policy.draft_worth import DraftWorth, Purpose
from sglang_qspec.sidecar.text import Aim
from test.sidecar.drafter_driver import ONE, DrafterDriver
from test.sidecar.scripted import ScriptedModel

STEP, FIRST, OTHER, SERVED = Purpose


class Judged:
    """A drafter that records its judgements; its model counts up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = DrafterDriver(ScriptedModel())
        self.found: list[tuple[Purpose, int, bool]] = []

        def judge(_: DraftWorth, purpose: Purpose, position: int, *, saved: bool) -> None:
            self.found.append((purpose, position, saved))

        monkeypatch.setattr(DraftWorth, "judge", judge)

    def submit(self, *, completions: int = 1, max_new_tokens: int = 10) -> None:
        self.driver.submit("a", [1, 2, 3], completions=completions, max_new_tokens=max_new_tokens)

    def serve(self, *, completions: int = 1) -> None:
        """Draft 4, 5, 6, ... for a waiting request, and admit it."""
        self.submit(completions=completions)
        self.driver.run()
        self.driver.admit("a")

    def step(self) -> None:
        """Serve a request whose output begins with 50, and draft the tokens 51 to 54 for it."""
        self.submit(max_new_tokens=1)
        self.driver.run()
        self.driver.admit("a")
        self.commit(0, 50)
        self.driver.run()

    def commit(
        self, base: int, *token_ids: int, lookahead: int = 4
    ) -> list[tuple[Purpose, int, bool]]:
        """Commit output, and return the new judgements."""
        self.found.clear()
        self.driver.commit("a", base, list(token_ids), lookahead)
        return list(self.found)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    return Judged(monkeypatch)


def test_aims_are_packed_in_a_byte() -> None:
    for purpose in Purpose:
        for position in (0, 1, 23):
            aim = Aim(purpose, position)
            assert [Aim.unpack(byte) for byte in aim.packed(3)] == [
                Aim(purpose, min(position + further, 23)) for further in range(3)
            ]
    assert Aim.unpack(*Aim(STEP, 999).packed(1)) == Aim(STEP, 23)


def test_the_last_token_of_a_commit_is_the_targets_own(judged: Judged) -> None:
    judged.serve()
    assert judged.commit(0, 4, lookahead=0) == [], "the token of the prefill"
    assert judged.commit(1, 5, 6, 7, lookahead=0) == [
        (FIRST, 1, True),
        (FIRST, 2, True),
        (FIRST, 3, False),
    ]


def test_wrong_tokens_save_nothing_and_a_later_right_one_may(judged: Judged) -> None:
    judged.serve()
    assert judged.commit(0, 4, 99, 6, 7, lookahead=0) == [
        (FIRST, 1, False),
        (FIRST, 2, True),
        (FIRST, 3, False),
    ]


def test_one_of_several_right_drafts_is_enough(judged: Judged) -> None:
    judged.serve(completions=3)
    found = judged.commit(0, 4, 5, 6, lookahead=0)
    assert found.count((FIRST, 1, True)) == 1
    assert found.count((OTHER, 1, False)) == 2
    assert not [each for each in found if each[0] is OTHER and each[2]]


def test_step_drafts_are_judged_by_their_distance_from_the_output(judged: Judged) -> None:
    judged.step()
    assert judged.commit(1, 51, 52) == [(STEP, 0, True), (STEP, 1, False)]
    judged.driver.run()  # extends the draft by 55 and 56
    found = judged.commit(3, 53, 54, 55, 99)
    assert found == [(STEP, 2, True), (STEP, 3, True), (STEP, 2, True), (STEP, 3, False)]


def test_the_rest_of_a_step_draft_that_the_target_leaves_is_worthless(judged: Judged) -> None:
    judged.step()
    assert judged.commit(1, 51, 99) == [(STEP, place, place == 0) for place in range(4)]


def test_what_is_drafted_after_the_request_is_served_counts_apart(judged: Judged) -> None:
    judged.submit()
    judged.driver.step(3)  # drafts 4, 5 and 6
    judged.driver.admit("a")
    judged.driver.run()
    assert judged.commit(0, 4, 5, 6, 7, 8, lookahead=0) == [
        *((FIRST, place, True) for place in (1, 2)),
        (SERVED, 3, True),
        (SERVED, 4, False),
    ]


def test_late_step_drafts_give_way_to_waiting_prompts() -> None:
    """The target never accepts a step draft here, because each comes after its pass."""
    driver = DrafterDriver(ScriptedModel(), apart=True)
    driver.submit("a", [1, 2, 3], max_new_tokens=1)
    driver.run()
    driver.admit("a")
    for number in range(120):
        driver.commit("a", number, [50 + number])
        driver.step(1)
    assert driver.told[ONE, "a", MAX_COMPLETIONS]
    driver.submit("w", [200, 201], max_new_tokens=30)
    driver.commit("a", 120, [170])
    driver.step(8)
    assert len(driver.told[ONE, "w", 0]) > 4
    driver.leave("a", "w")
