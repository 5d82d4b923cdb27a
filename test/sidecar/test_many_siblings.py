"""Many sampled requests of one prompt: what each costs, and what is left of those that are over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar.prompt import MAX_PROMPT_COMPLETIONS
from test.sidecar.desk import ONE, TWO, Desk
from test.sidecar.scripted import ScriptedModel

PROMPT = [1, 2, 3]


def sampled(desk: Desk, rid: str, seed: int, completions: int = 4) -> None:
    desk.submit(rid, PROMPT, completions=completions, seeded=SeededSampling(seed, 1.0))


def in_flight(desk: Desk, requests: int, at_once: int) -> Iterator[None]:
    """Requests one after another, each begun as the oldest of `at_once` ends."""
    live: list[str] = []
    for number in range(requests):
        if len(live) == at_once:
            desk.close(live.pop(0))
        live.append(f"r{number}")
        sampled(desk, live[-1], seed=number)
        yield
    desk.leave(*live)


def test_a_completion_goes_with_the_last_request_that_gets_it() -> None:
    desk = Desk(ScriptedModel())
    most = 0
    for _ in in_flight(desk, requests=200, at_once=4):
        desk.step()
        (prompt,) = desk.drafter._turns.prompts.values()
        most = max(most, len(prompt.completions))
    # The oldest three others are shared by all, and each request has one of its own.
    assert most <= 4 + 3


def test_drafting_for_many_siblings_does_not_hold_up_another_prompt() -> None:
    desk = Desk(ScriptedModel(), slots=8)
    for number in range(100):
        sampled(desk, f"r{number}", seed=number)
    desk.step()
    for number in range(100):
        desk.close(f"r{number}")
    sampled(desk, "late", seed=1000)
    desk.submit("other", [7, 8], peer=TWO)
    before = len(desk.model.passes)
    while not desk.told[TWO, "other", 0]:
        desk.step()
    assert len(desk.model.passes) - before <= 2
    desk.leave("late")


def test_a_prompt_has_a_bounded_number_of_completions_and_all_requests_get_some() -> None:
    desk = Desk(ScriptedModel())
    names = [f"r{number}" for number in range(MAX_PROMPT_COMPLETIONS + 40)]
    for number, rid in enumerate(names):
        sampled(desk, rid, seed=number)
    (prompt,) = desk.drafter._turns.prompts.values()
    assert len(prompt.completions) == MAX_PROMPT_COMPLETIONS
    desk.run()
    for rid in names:
        assert sum(len(desk.told[ONE, rid, number]) == 10 for number in range(4)) >= 3
    # One that came too late for a completion of its own gets it where another ends.
    assert (ONE, names[-1], 0) not in desk.finished
    for rid in names[:44]:  # three of which leave a completion that others share
        desk.close(rid)
    desk.run()
    assert (ONE, names[-1], 0) in desk.finished
    desk.leave(*names)


@pytest.mark.parametrize("order", ["old first", "new first", "own first"])
def test_siblings_that_leave_in_any_order_leave_nothing(order: str) -> None:
    desk = Desk(ScriptedModel())
    names = [f"r{number}" for number in range(20)]
    for number, rid in enumerate(names):
        sampled(desk, rid, seed=number, completions=3)
        if number % 3 == 0:
            desk.step()
    if order == "new first":
        names.reverse()
    elif order == "own first":
        names = names[5:] + names[:5]
    for rid in names:
        desk.close(rid)
        desk.drafter.check_integrity()
        if not desk.drafter.idle:
            desk.step()
    desk.leave()


def test_a_submission_and_a_delivery_touch_no_more_completions_the_more_siblings_there_are() -> (
    None
):
    """Counted in looks at completions and messages, as times would be noise."""

    def messages_of_the_last(siblings: int) -> int:
        desk = Desk(ScriptedModel(rows=256))
        for number in range(siblings):
            sampled(desk, f"r{number}", seed=number, completions=8)
        desk.run()
        desk.drafter.take()
        sampled(desk, "last", seed=10_000, completions=8)
        desk.run()
        prompt = desk.drafter._wanted[ONE, desk.number("last")]
        shares = prompt.subscriptions[ONE, desk.number("last")].shares
        desk.leave(*(f"r{number}" for number in range(siblings)), "last")
        return len(shares)

    assert messages_of_the_last(10) == messages_of_the_last(300) == 8
