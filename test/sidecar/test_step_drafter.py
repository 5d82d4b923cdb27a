"""Step drafts for served requests, over the scripted model."""

import pytest
import torch

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.messages import MAX_CANDIDATES, Commit, Commits, Drafted, SeededSampling
from sglang_qspec.sidecar.batch_scheduler import BESIDE_STEPS, READ_BESIDE_STEPS
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from test.sidecar.drafter_driver import ONE, DrafterDriver
from test.sidecar.scripted import ScriptedModel

FIRST, SECOND = MAX_COMPLETIONS, MAX_COMPLETIONS + 1


def served(driver: DrafterDriver, rid: str = "a", prompt: list[int] | None = None) -> None:
    """Submit a request, draft its completions (4, 5, ... after the default prompt), admit it."""
    driver.submit(rid, prompt or [1, 2, 3])
    driver.run()
    driver.admit(rid)


def test_a_diverged_request_gets_a_draft_from_its_committed_output() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [4, 5, 50])
    driver.run()
    assert driver.told[ONE, "a", FIRST] == list(range(51, 61))
    assert driver.base_lens["a"] == 3
    driver.leave("a")


def test_greedy_step_drafts_carry_second_choices_and_no_other_drafts_do() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.model.second = lambda token: token + 100
    served(driver)
    served(driver, "b", [7, 8, 9])
    driver.commit("a", 0, [4, 50], max_new_tokens=4)
    driver.step(2)
    driver.commit("b", 0, [60], max_new_tokens=3)
    driver.run()
    driver.commit("a", 2, [51], max_new_tokens=5)
    driver.run()
    for rid in "ab":
        told = driver.told[ONE, rid, FIRST]
        assert driver.seconds.pop((ONE, rid, FIRST)) == [token + 100 for token in told]
    assert not any(driver.seconds.values())
    driver.submit("c", [1, 2, 3], seeded=SeededSampling(1, 1.0, 1 << 30, 1.0, 0.0))
    driver.run()
    driver.admit("c")
    driver.commit("c", 0, [70])
    driver.run()
    assert driver.told[ONE, "c", FIRST]
    assert not any(driver.seconds.values())
    driver.leave("a", "b", "c")


def test_only_tokens_after_the_divergence_are_prefilled_again() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver, prompt=list(range(100, 140)))
    before = driver.model.read_tokens
    driver.commit("a", 0, [140, 141, 142, 500, 501])
    driver.run()
    driver.commit("a", 5, [502, 503, 600])
    driver.run()
    assert driver.told[ONE, "a", SECOND] == list(range(601, 611))
    assert driver.model.read_tokens - before <= 2 + 1
    driver.leave("a")


def test_no_step_draft_is_made_while_an_agreeing_queue_draft_is_far_enough_ahead() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [4, 5], max_new_tokens=8)
    assert driver.drafter.idle
    driver.commit("a", 2, [6], max_new_tokens=8)
    driver.run()
    assert driver.told[ONE, "a", FIRST] == list(range(7, 15))
    driver.leave("a")


def test_a_draft_pauses_when_far_enough_ahead_and_continues_when_it_is_followed() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [50], max_new_tokens=3)
    driver.run()
    assert driver.told[ONE, "a", FIRST] == [51, 52, 53]
    before = driver.model.read_tokens
    driver.commit("a", 1, [51, 52], max_new_tokens=3)
    driver.run()
    assert driver.told[ONE, "a", FIRST] == [51, 52, 53, 54, 55]
    driver.commit("a", 3, [53], max_new_tokens=1)  # already far enough ahead
    assert driver.drafter.idle
    driver.commit("a", 4, [54, 55], max_new_tokens=2)  # exactly the whole draft
    driver.run()
    assert driver.told[ONE, "a", FIRST] == list(range(51, 58))
    assert driver.model.read_tokens == before
    assert (ONE, "a", SECOND) not in driver.told
    driver.leave("a")


def test_a_draft_that_reached_a_stop_token_does_not_continue() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3], stop=[53])
    driver.run()
    driver.admit("a")
    driver.commit("a", 0, [50])
    driver.run()
    driver.commit("a", 1, [51])
    assert driver.drafter.idle
    assert driver.told[ONE, "a", FIRST] == [51, 52, 53]
    driver.leave("a")


def test_a_new_draft_replaces_one_that_diverged_or_fell_behind() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [50])
    driver.step(3)
    driver.commit("a", 1, list(range(51, 57)))  # passes the draft
    driver.step(2)
    driver.commit("a", 7, [90])  # diverges
    driver.run()
    assert len(driver.told[ONE, "a", FIRST]) < 10
    assert driver.told[ONE, "a", SECOND][:1] == [57]
    assert driver.told[ONE, "a", SECOND + 1] == list(range(91, 101))
    assert driver.base_lens["a"] == 8
    driver.leave("a")


def test_a_request_without_queue_drafts_gets_step_drafts() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3], completions=0)
    assert driver.drafter.idle
    driver.commit("a", 0, [50])
    driver.run()
    assert driver.told[ONE, "a", FIRST] == list(range(51, 61))
    driver.leave("a")


def test_the_drafter_asks_for_missing_tokens_or_an_unknown_request() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("unknown", 0, [50])
    driver.commit("a", 1, [51])
    assert driver.gaps == [("unknown", None), ("a", 0)]
    assert driver.drafter.idle
    driver.commit("a", 0, [50, 51])
    driver.commit("a", 0, [50, 51])  # a repeated answer to the Gap
    driver.commit("a", 1, [51, 52])
    driver.run()
    assert len(driver.gaps) == 2
    assert driver.told[ONE, "a", SECOND][0] == 53
    assert driver.base_lens["a"] == 3
    driver.leave("a")


def test_a_draft_is_as_long_as_requested_and_ends_at_the_context() -> None:
    driver = DrafterDriver(ScriptedModel(context_len=400))
    served(driver)
    driver.commit("a", 0, [50], max_new_tokens=4)
    driver.run()
    assert driver.told[ONE, "a", FIRST] == [51, 52, 53, 54]
    driver.commit("a", 1, [7] * 390, max_new_tokens=1000)
    driver.run()
    assert len(driver.told[ONE, "a", SECOND]) == 400 - 394
    driver.commit("a", 391, [7] * 6)  # the context is full
    assert driver.drafter.idle
    assert "no longer fits" in driver.declined["a"]
    driver.leave("a")


@pytest.mark.parametrize("apart", [True, False])
def test_step_drafts_come_first_and_with_apart_in_passes_of_their_own(apart: bool) -> None:
    driver = DrafterDriver(ScriptedModel(), apart=apart)
    served(driver)
    for number in range(4):
        driver.submit(f"w{number}", [200 + 10 * number, 201 + 10 * number], completions=8)
    driver.step(12)
    rows = 32
    assert driver.model.passes[-1] == ("step", rows, rows) or apart
    driver.commit("a", 0, [50], max_new_tokens=3)
    driver.run()
    sizes = [size for verb, size, _ in driver.model.passes if verb == "step"]
    assert driver.told[ONE, "a", FIRST] == [51, 52, 53]
    assert (max(sizes[-8:]) <= BESIDE_STEPS) is apart
    driver.leave("a", "w0", "w1", "w2", "w3")


@pytest.mark.parametrize("apart", [True, False])
def test_prompts_are_prefilled_in_small_chunks_where_a_step_may_have_to_wait(apart: bool) -> None:
    driver = DrafterDriver(ScriptedModel(), apart=apart, prefill_tokens=200)
    served(driver)
    driver.submit("w", list(range(100, 250)))
    driver.commit("a", 0, [50])
    driver.run()
    longest = max(tokens for verb, _, tokens in driver.model.passes if verb == "extend")
    assert longest == READ_BESIDE_STEPS if apart else longest >= 150
    assert driver.told[ONE, "w", 0] == list(range(250, 260))
    driver.leave("a", "w")


def test_completions_behind_the_output_of_all_subscribers_are_dropped() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=3)
    driver.submit("a", [1, 2, 3])
    driver.submit("b", [1, 2, 3])
    driver.step(3)
    driver.admit("a")
    driver.commit("a", 0, [4, 5, 6, 7, 8, 9])
    assert not driver.finished  # the completions can still help b
    driver.admit("b")
    driver.commit("b", 0, [4, 5, 6, 7, 8, 9])
    assert len(driver.finished) == 6
    assert len(driver.told[ONE, "a", 2]) == 3
    driver.run()
    assert driver.told[ONE, "a", FIRST] == driver.told[ONE, "b", FIRST] == list(range(10, 20))
    driver.leave("a", "b")


def alike(
    driver: DrafterDriver, seed: int, prompt: list[int], output: list[int], count: int
) -> list[int]:
    """The tokens that a target with the model's logits draws after a prompt and its output."""
    drawn: list[int] = []
    for _ in range(count):
        text = (*prompt, *output, *drawn)
        logits = torch.zeros(1, driver.model.vocab_size)
        logits[0, driver.model.script(text)] = driver.model.certainty
        # SGLang numbers a draw by the position of the token before it.
        at = torch.tensor([len(text) - 1])
        drawn.append(int(gumbel_argmax(torch.softmax(logits, -1), torch.tensor([seed]), at)))
    return drawn


def test_drafts_of_a_sampled_request_are_drawn_like_the_targets_tokens() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.model.certainty = 7.0  # the script's token is about as likely as all others together
    driver.submit("a", [1, 2, 3], seeded=SeededSampling(5, 1.0))
    driver.submit("b", [1, 2, 3], seeded=SeededSampling(6, 1.0))
    driver.run()
    for rid, seed in (("a", 5), ("b", 6)):
        assert driver.told[ONE, rid, 0] == alike(driver, seed, [1, 2, 3], [], 10)
        driver.admit(rid)
        driver.commit(rid, 0, [50, 51])
        driver.run()
        assert driver.told[ONE, rid, FIRST] == alike(driver, seed, [1, 2, 3], [50, 51], 10)
    assert driver.told[ONE, "a", FIRST] != driver.told[ONE, "b", FIRST]
    followed = driver.told[ONE, "a", FIRST][:4]
    driver.commit("a", 2, followed)
    driver.run()
    assert driver.told[ONE, "a", FIRST] == alike(driver, 5, [1, 2, 3], [50, 51], 14)
    driver.leave("a", "b")


def test_step_drafts_carry_their_candidates_if_the_target_asks_for_probabilities() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.model.certainty = 2.0  # the likeliest token has a tenth of the candidates' probability
    driver.submit("a", [1, 2, 3], seeded=SeededSampling(0, 1.0, probabilities=True))
    driver.run()
    # Greedy, because the seed of such a target is unknown.
    assert driver.told[ONE, "a", 0] == list(range(4, 14))
    driver.admit("a")
    # A greedy draft agrees only by chance, so step drafts begin all the same.
    driver.drafter.follow(ONE, Commits([Commit(driver.number("a"), 0, [4, 5], 8)]))
    steps: list[Drafted] = []
    while not driver.drafter.idle:
        driver.drafter.step()
        steps += [message for _, message in driver.drafter.take() if isinstance(message, Drafted)]
    text = [1, 2, 3, 4, 5]
    for step in steps:
        (token,), (candidates,) = step.token_ids, step.candidates  # each token is sent at once
        assert step.completion == FIRST
        assert token in candidates.token_ids
        assert candidates.token_ids[0] == text[-1] + 1
        assert len(candidates.token_ids) == len(candidates.probs) == MAX_CANDIDATES
        text.append(token)
    assert len(text) == 13
    assert text[5:] != list(range(6, 14))
    driver.leave("a")


@pytest.mark.parametrize("greedy_first", [True, False])
def test_a_greedy_queue_draft_does_not_replace_step_drafts_of_a_sampled_request(
    greedy_first: bool,
) -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3], seeded=SeededSampling(5, 1.0), greedy_first=greedy_first)
    driver.run()
    driver.admit("a")
    driver.commit("a", 0, [4, 5], max_new_tokens=8)
    # With greedy_first one draft uses the request's seed; otherwise none does.
    assert driver.drafter.idle is greedy_first
    driver.run()
    assert driver.told[ONE, "a", FIRST] == ([] if greedy_first else list(range(6, 14)))
    driver.leave("a")


def test_closing_a_request_ends_its_step_draft_and_frees_its_kv() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [50])
    driver.step(2)
    assert driver.drafter.requests == 1
    driver.leave("a")


def test_rows_of_paused_drafts_give_way_to_waiting_prompts() -> None:
    driver = DrafterDriver(ScriptedModel(tokens=60, rows=4))
    served(driver)
    driver.commit("a", 0, [50])
    driver.run()
    for number in range(6):
        driver.submit(f"w{number}", list(range(100 * number, 100 * number + 12)))
    driver.run()
    for number in range(6):
        start = 100 * number + 12
        assert driver.told[ONE, f"w{number}", 2] == list(range(start, start + 10))
    driver.commit("a", 1, [70])  # its rows are gone, so it is prefilled again
    driver.run()
    assert driver.told[ONE, "a", SECOND] == list(range(71, 81))
    driver.leave("a", *(f"w{number}" for number in range(6)))


def test_the_server_learns_after_each_commit_when_its_step_draft_is_complete() -> None:
    driver = DrafterDriver(ScriptedModel())
    served(driver)
    driver.commit("a", 0, [4, 5], max_new_tokens=8)
    assert driver.rests == {"a": 2}  # a queue draft is far enough ahead
    driver.commit("a", 2, [50], max_new_tokens=2)
    assert driver.rests == {"a": 2}
    driver.step(2)
    assert driver.rests == {"a": 3}  # with the last token
    driver.commit("a", 3, [51], max_new_tokens=1)
    assert driver.rests == {"a": 4}  # already far enough ahead
    driver.commit("a", 9, [60], max_new_tokens=1)
    assert driver.rests == {"a": 4}  # a gap gives no information
    driver.commit("a", 4, [70], max_new_tokens=0)
    assert driver.rests == {"a": 5}  # no draft is requested
    driver.leave("a")
