"""Requests of one prompt with their own seeds, like the n answers to one request."""

import pytest

from sglang_qspec.messages import SeededSampling
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import undecided

NUMBERS = range(4)
NAMES = "abcd"


def alone(seed: int) -> list[int]:
    """The seeded completion of a request with this seed that has no siblings."""
    driver = DrafterDriver(undecided())
    driver.submit("a", [1, 2, 3], completions=1, seeded=SeededSampling(seed, 1.0))
    driver.run()
    return driver.told[ONE, "a", 0]


def test_n_answers_to_a_prompt_cost_the_drafts_of_one() -> None:
    driver = DrafterDriver(undecided())
    for seed, rid in enumerate(NAMES):
        driver.submit(rid, [1, 2, 3], completions=4, seeded=SeededSampling(seed, 1.0))
    driver.run()
    assert driver.drafter.statistics.drafted_tokens == 4 * 10
    for seed, rid in enumerate(NAMES):
        assert driver.told[ONE, rid, 0] == alone(seed)
        shared = [driver.told[ONE, rid, number] for number in NUMBERS]
        assert sorted(shared) == sorted(map(alone, range(4)))
    driver.leave(*NAMES)


def test_a_prompt_has_shared_sampled_completions_beside_the_seeded_ones() -> None:
    driver = DrafterDriver(undecided())
    for seed, rid in enumerate("ab"):
        driver.submit(rid, [1, 2, 3], completions=4, seeded=SeededSampling(seed, 1.0))
    driver.run()
    assert driver.drafter.statistics.drafted_tokens == 4 * 10
    told = {rid: [driver.told[ONE, rid, number] for number in NUMBERS] for rid in "ab"}
    assert sorted(told["a"]) == sorted(told["b"])
    assert told["a"][0] == alone(0)
    assert told["b"][0] == alone(1)
    driver.leave("a", "b")


@pytest.mark.parametrize("steps", [1, 2, 5, 30])
def test_a_late_sibling_gets_its_own_completion_and_the_existing_ones(steps: int) -> None:
    driver = DrafterDriver(undecided(), share=True)
    driver.submit("a", [1, 2, 3], completions=3, seeded=SeededSampling(0, 1.0))
    driver.step(min(steps, 11))
    driver.submit("b", [1, 2, 3], peer=TWO, completions=3, seeded=SeededSampling(1, 1.0))
    driver.run()
    assert driver.told[TWO, "b", 0] == alone(1)
    assert driver.told[ONE, "a", 0] == alone(0)
    assert driver.told[TWO, "b", 1] == driver.told[ONE, "a", 0]
    assert driver.told[TWO, "b", 2] == driver.told[ONE, "a", 1]
    assert (ONE, "a", 3) not in driver.told  # it requested three
    assert driver.drafter.statistics.drafted_tokens == 4 * 10
    driver.leave("a")


def test_requests_with_equal_seeds_share_one_completion() -> None:
    driver = DrafterDriver(undecided())
    for rid in "ab":
        driver.submit(rid, [1, 2, 3], completions=1, seeded=SeededSampling(5, 1.0))
    driver.run()
    assert driver.drafter.statistics.drafted_tokens == 10
    assert driver.told[ONE, "a", 0] == driver.told[ONE, "b", 0] == alone(5)
    driver.leave("a", "b")
