"""Many sampled requests of one prompt: the cost of each, and cleanup after they end."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar.prompt import MAX_PROMPT_COMPLETIONS
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel

PROMPT = [1, 2, 3]


def sampled(driver: DrafterDriver, rid: str, seed: int, completions: int = 4) -> None:
    driver.submit(rid, PROMPT, completions=completions, seeded=SeededSampling(seed, 1.0))


def in_flight(driver: DrafterDriver, requests: int, at_once: int) -> Iterator[None]:
    """Submit requests one after another; close the oldest so that at most `at_once` are open."""
    live: list[str] = []
    for number in range(requests):
        if len(live) == at_once:
            driver.close(live.pop(0))
        live.append(f"r{number}")
        sampled(driver, live[-1], seed=number)
        yield
    driver.leave(*live)


def test_a_completion_is_dropped_with_its_last_subscriber() -> None:
    driver = DrafterDriver(ScriptedModel())
    most = 0
    for _ in in_flight(driver, requests=200, at_once=4):
        driver.step()
        (prompt,) = driver.drafter.queue.prompts.values()
        most = max(most, len(prompt.completions))
    # All requests share the three oldest others, and each has one of its own.
    assert most <= 4 + 3


def test_drafting_for_many_siblings_does_not_hold_up_another_prompt() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=8)
    for number in range(100):
        sampled(driver, f"r{number}", seed=number)
    driver.step()
    for number in range(100):
        driver.close(f"r{number}")
    sampled(driver, "late", seed=1000)
    driver.submit("other", [7, 8], peer=TWO)
    before = len(driver.model.passes)
    while not driver.told[TWO, "other", 0]:
        driver.step()
    assert len(driver.model.passes) - before <= 2
    driver.leave("late")


def test_a_prompt_has_a_bounded_number_of_completions_and_all_requests_get_some() -> None:
    driver = DrafterDriver(ScriptedModel())
    names = [f"r{number}" for number in range(MAX_PROMPT_COMPLETIONS + 40)]
    for number, rid in enumerate(names):
        sampled(driver, rid, seed=number)
    (prompt,) = driver.drafter.queue.prompts.values()
    assert len(prompt.completions) == MAX_PROMPT_COMPLETIONS
    driver.run()
    for rid in names:
        assert sum(len(driver.told[ONE, rid, number]) == 10 for number in range(4)) >= 3
    # A request too late for its own completion gets one when another request ends.
    assert (ONE, names[-1], 0) not in driver.finished
    for rid in names[:44]:  # of which three have completions that others share
        driver.close(rid)
    driver.run()
    assert (ONE, names[-1], 0) in driver.finished
    driver.leave(*names)


@settings(max_examples=30)
@given(st.permutations(range(12)), st.lists(st.booleans(), min_size=12, max_size=12))
def test_siblings_that_close_in_any_order_leave_nothing(
    order: list[int], stepped: list[bool]
) -> None:
    driver = DrafterDriver(ScriptedModel())
    for number, steps in enumerate(stepped):
        sampled(driver, f"r{number}", seed=number, completions=3)
        if steps:
            driver.step()
    for number in order:
        driver.close(f"r{number}")
        driver.drafter.check_integrity()
        if not driver.drafter.idle:
            driver.step()
    driver.leave()


def test_the_number_of_siblings_does_not_change_the_completions_of_a_submission() -> None:
    """The test counts shares, because times would be noisy."""

    def messages_of_the_last(siblings: int) -> int:
        driver = DrafterDriver(ScriptedModel(rows=256))
        for number in range(siblings):
            sampled(driver, f"r{number}", seed=number, completions=8)
        driver.run()
        driver.drafter.take()
        sampled(driver, "last", seed=10_000, completions=8)
        driver.run()
        prompt = driver.drafter._wanted[ONE, driver.number("last")]
        shares = prompt.subscriptions[ONE, driver.number("last")].shares
        driver.leave(*(f"r{number}" for number in range(siblings)), "last")
        return len(shares)

    assert messages_of_the_last(10) == messages_of_the_last(300) == 8
