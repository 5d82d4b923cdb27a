"""Requests of one prompt with dice of their own, as the n answers to one request are."""

import pytest

from sglang_qspec.messages import SeededSampling
from test.sidecar.desk import ONE, TWO, Desk
from test.sidecar.scripted import ScriptedModel

NUMBERS = range(4)
NAMES = "abcd"


def undecided() -> ScriptedModel:
    """A model whose samples differ."""
    model = ScriptedModel()
    model.certainty = 7.0
    return model


def alone(seed: int) -> list[int]:
    """The completion that a request with dice of this seed is likeliest to follow."""
    desk = Desk(undecided())
    desk.submit("a", [1, 2, 3], completions=1, seeded=SeededSampling(seed, 1.0))
    desk.run()
    return desk.told[ONE, "a", 0]


def test_n_answers_to_a_prompt_are_drafted_for_at_the_price_of_one() -> None:
    desk = Desk(undecided())
    for seed, rid in enumerate(NAMES):
        desk.submit(rid, [1, 2, 3], completions=4, seeded=SeededSampling(seed, 1.0))
    desk.run()
    assert desk.drafter.drafted_tokens == 4 * 10
    for seed, rid in enumerate(NAMES):
        assert desk.told[ONE, rid, 0] == alone(seed)
        shared = [desk.told[ONE, rid, number] for number in NUMBERS]
        assert sorted(shared) == sorted(map(alone, range(4)))
    desk.leave(*NAMES)


def test_a_prompt_has_sampled_completions_beside_those_of_its_requests() -> None:
    desk = Desk(undecided())
    for seed, rid in enumerate("ab"):
        desk.submit(rid, [1, 2, 3], completions=4, seeded=SeededSampling(seed, 1.0))
    desk.run()
    assert desk.drafter.drafted_tokens == 4 * 10
    told = {rid: [desk.told[ONE, rid, number] for number in NUMBERS] for rid in "ab"}
    assert sorted(told["a"]) == sorted(told["b"])
    assert told["a"][0] == alone(0)
    assert told["b"][0] == alone(1)
    desk.leave("a", "b")


@pytest.mark.parametrize("steps", [1, 2, 5, 30])
def test_one_that_comes_late_gets_a_completion_of_its_own_and_all_that_is_there(steps: int) -> None:
    desk = Desk(undecided(), share=True)
    desk.submit("a", [1, 2, 3], completions=3, seeded=SeededSampling(0, 1.0))
    desk.step(min(steps, 11))
    desk.submit("b", [1, 2, 3], peer=TWO, completions=3, seeded=SeededSampling(1, 1.0))
    desk.run()
    assert desk.told[TWO, "b", 0] == alone(1)
    assert desk.told[ONE, "a", 0] == alone(0)
    assert desk.told[TWO, "b", 1] == desk.told[ONE, "a", 0]
    assert desk.told[TWO, "b", 2] == desk.told[ONE, "a", 1]
    assert (ONE, "a", 3) not in desk.told  # it asked for three
    assert desk.drafter.drafted_tokens == 4 * 10
    desk.leave("a")


def test_siblings_may_leave_in_any_order() -> None:
    for order in ("abcd", "dcba", "bdac"):
        desk = Desk(undecided())
        for seed, rid in enumerate(NAMES):
            desk.submit(rid, [1, 2, 3], completions=2, seeded=SeededSampling(seed, 1.0))
        for rid in order:
            desk.step(2)
            desk.close(rid)
            desk.drafter.check_integrity()
        desk.leave()


def test_equal_dice_share_one_completion() -> None:
    desk = Desk(undecided())
    for rid in "ab":
        desk.submit(rid, [1, 2, 3], completions=1, seeded=SeededSampling(5, 1.0))
    desk.run()
    assert desk.drafter.drafted_tokens == 10
    assert desk.told[ONE, "a", 0] == desk.told[ONE, "b", 0] == alone(5)
    desk.leave("a", "b")
