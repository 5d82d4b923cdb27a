import pytest

from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel


def test_each_completion_follows_the_model_up_to_max_new_tokens() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3], base_len=2)
    driver.run()
    for completion in range(3):
        assert driver.told[ONE, "a", completion] == list(range(4, 14))
    assert len(driver.finished) == 3
    assert driver.base_lens["a"] == 2
    assert driver.drafter.statistics.drafted_tokens == 30
    driver.leave("a")


def test_the_first_token_is_sent_at_once_and_the_rest_in_chunks() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3])
    driver.step()
    assert [driver.told[ONE, "a", i] for i in range(3)] == [[4]] * 3
    driver.step()
    assert driver.told[ONE, "a", 0] == [4]
    driver.step(2)
    assert driver.told[ONE, "a", 0] == [4, 5, 6, 7]
    driver.leave("a")


def test_equal_prompts_are_drafted_once_for_all_their_requests() -> None:
    driver = DrafterDriver(ScriptedModel(), share=True)
    driver.submit("a", [1, 2, 3])
    driver.submit("b", [1, 2, 3], peer=TWO)
    driver.submit("c", [1, 2, 3], completions=2)
    driver.run()
    assert driver.told[TWO, "b", 2] == driver.told[ONE, "a", 2] == list(range(4, 14))
    assert driver.told[ONE, "c", 1] == list(range(4, 14))
    assert driver.drafter.statistics.drafted_tokens == 50
    driver.leave("a", "c")


def test_waiting_requests_are_drafted_before_served_ones() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=3)
    driver.submit("served", [1, 2, 3])
    driver.step(2)
    driver.admit("served")
    driver.admit("unknown")
    driver.submit("waits", [4, 5, 6])
    driver.step(12)
    assert len(driver.told[ONE, "waits", 2]) == 10
    assert len(driver.told[ONE, "served", 2]) < 10
    driver.run()
    assert len(driver.told[ONE, "served", 2]) == 10
    driver.leave("served", "waits")


def test_a_prompt_counts_as_waiting_while_one_of_its_requests_waits() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=1)
    driver.submit("first", [1, 2, 3], completions=1)
    driver.submit("other", [4, 5, 6], completions=1)
    driver.admit("first")
    driver.submit("second", [1, 2, 3], completions=1)  # waits again, behind "other"
    driver.submit("third", [7, 8, 9], completions=1)
    driver.step(22)
    assert len(driver.told[ONE, "second", 0]) == len(driver.told[ONE, "other", 0]) == 10
    assert len(driver.told[ONE, "third", 0]) < 10
    driver.leave("first", "other", "second", "third")


def test_a_prompt_is_deferred_when_its_last_waiting_request_is_closed() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=3)
    driver.submit("first", [1, 2, 3])
    driver.submit("second", [1, 2, 3])
    driver.admit("first")
    driver.close("second")
    driver.submit("other", [4, 5, 6])
    driver.step(12)
    assert len(driver.told[ONE, "other", 2]) == 10
    assert len(driver.told[ONE, "first", 2]) < 10
    driver.run()
    driver.leave("first", "other")


def test_a_late_request_gets_the_existing_tokens_at_once_and_then_the_rest() -> None:
    driver = DrafterDriver(ScriptedModel(), share=True)
    driver.submit("a", [1, 2, 3])
    driver.step(6)
    driver.submit("b", [1, 2, 3], peer=TWO)
    assert driver.told[TWO, "b", 0] == list(range(4, 10))
    driver.run()
    driver.submit("c", [1, 2, 3])
    assert driver.told[TWO, "b", 2] == driver.told[ONE, "c", 2] == list(range(4, 14))
    assert (ONE, "c", 0) in driver.finished
    assert driver.drafter.statistics.drafted_tokens == 30
    driver.leave("a", "c")


def test_greedy_completions_of_all_prompts_come_before_sampled_ones() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=1)
    for number, rid in enumerate("abc"):
        driver.submit(rid, [100 * number, 100 * number + 1])
    driver.run()
    order = [(rid, completion) for _, rid, completion in driver.finished]
    assert order[:3] == [("a", 0), ("b", 0), ("c", 0)]
    assert order[3:] == [(rid, completion) for rid in "abc" for completion in (1, 2)]
    driver.leave("a", "b", "c")


def test_prompts_are_drafted_in_the_order_of_their_ranks() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=1)
    for number, (rid, rank) in enumerate({"a": (1, 0), "b": (-5, 0), "c": (1, -3)}.items()):
        driver.submit(rid, [100 * number, 100 * number + 1], completions=1, rank=rank)
    driver.run()
    assert [rid for _, rid, _ in driver.finished] == ["b", "c", "a"]
    driver.leave("a", "b", "c")


def test_without_greedy_first_all_completions_are_sampled() -> None:
    model = ScriptedModel()
    model.certainty = 0.0  # all tokens are equally likely
    driver = DrafterDriver(model)
    driver.submit("a", [1, 2, 3])
    driver.submit("b", [1, 2, 3], greedy_first=False)
    driver.run()
    assert driver.told[ONE, "a", 0] == [0] * 10  # the lowest id wins a tie
    assert driver.told[ONE, "b", 0] != [0] * 10
    assert driver.told[ONE, "b", 0] != driver.told[ONE, "b", 1] == driver.told[ONE, "a", 1]
    driver.leave("a", "b")


def test_a_new_greedy_completion_overtakes_and_the_paused_one_continues() -> None:
    driver = DrafterDriver(ScriptedModel(), slots=3)
    driver.submit("a", [1, 2, 3], max_new_tokens=50)
    driver.step(5)
    driver.submit("b", [200, 201], completions=1)
    driver.run()
    assert driver.finished[0] == (ONE, "b", 0)
    assert driver.told[ONE, "a", 2] == list(range(4, 54))
    assert max(rows for verb, rows, _ in driver.model.passes if verb == "step") == 3
    driver.leave("a", "b")


def test_a_close_stops_drafting_and_frees_kv_at_once() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3])
    driver.submit("b", [1, 2, 3], peer=TWO)
    driver.step(3)
    driver.close("a")
    driver.step(3)
    assert (ONE, "a", 0) not in driver.finished
    assert not driver.drafter.idle
    driver.close("b", TWO)
    assert driver.drafter.idle
    assert driver.model.rows.free_slots == driver.model.rows.total_slots
    driver.close("unknown")
    driver.leave()


def test_drafting_stops_for_a_departed_server() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3])
    for rid in "bcd":
        driver.submit(rid, [7, 8], peer=TWO)
    driver.step(2)
    driver.drafter.drop(TWO)
    assert driver.drafter.requests == 1
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(4, 14))
    driver.leave("a")


def test_a_completion_ends_at_a_stop_token_or_at_eos() -> None:
    driver = DrafterDriver(ScriptedModel(eos_token_ids=[30]))
    driver.submit("stop", [1, 2, 3], stop=[6])
    driver.submit("eos", [27, 28])
    driver.submit("on", [27, 28], ignore_eos=True)
    driver.submit("first", [28, 29])
    driver.run()
    assert driver.told[ONE, "stop", 1] == [4, 5, 6]
    assert driver.told[ONE, "eos", 1] == [29, 30]
    assert driver.told[ONE, "on", 1] == list(range(29, 39))
    assert driver.told[ONE, "first", 2] == [30]
    driver.leave("stop", "eos", "on", "first")


def test_the_setting_and_the_context_cap_the_length() -> None:
    driver = DrafterDriver(ScriptedModel(context_len=40), max_completion_tokens=6)
    driver.submit("setting", [1, 2, 3])
    driver.submit("context", [1] * 37)
    driver.submit("nothing", [2, 3], max_new_tokens=0)
    driver.run()
    assert len(driver.told[ONE, "setting", 0]) == 6
    assert len(driver.told[ONE, "context", 2]) == 3
    assert len(driver.finished) == 9
    driver.leave("setting", "context", "nothing")


@pytest.mark.parametrize("token_ids", [[], [1] * 40, [1] * 41, [1] * 500])
def test_a_prompt_that_cannot_fit_is_declined_and_dropped(token_ids: list[int]) -> None:
    driver = DrafterDriver(ScriptedModel(context_len=40))
    driver.submit("a", token_ids)
    assert list(driver.declined) == ["a"]
    assert driver.drafter.requests == len(driver.drafter.queue.prompts) == 0
    assert driver.drafter.idle
    driver.leave("a")


def test_long_prompts_are_prefilled_in_chunks_and_others_advance_in_between() -> None:
    driver = DrafterDriver(ScriptedModel(), prefill_tokens=10)
    driver.submit("a", [1, 2, 3])
    driver.step(2)
    driver.submit("b", list(range(100, 135)))
    driver.step(3)
    assert driver.model.passes[-6:] == [("extend", 1, 10), ("step", 3, 3)] * 3
    driver.run()
    assert driver.told[ONE, "b", 2] == list(range(135, 145))
    driver.leave("a", "b")


def test_a_common_prefix_of_prompts_is_prefilled_once() -> None:
    driver = DrafterDriver(ScriptedModel())
    system = list(range(100, 150))
    for number, rid in enumerate("abc"):
        driver.submit(rid, [*system, number])
    driver.run()
    assert sum(tokens for verb, _, tokens in driver.model.passes if verb == "extend") <= 51 + 1
    for number, rid in enumerate("abc"):
        for completion in range(3):
            assert driver.told[ONE, rid, completion] == list(range(number + 1, number + 11))
    driver.leave("a", "b", "c")


@pytest.mark.parametrize(("tokens", "rows"), [(100, 64), (45, 64), (30, 64), (400, 3), (60, 4)])
def test_scarce_kv_costs_time_but_no_tokens(tokens: int, rows: int) -> None:
    driver = DrafterDriver(ScriptedModel(tokens=tokens, rows=rows), prefill_tokens=8)
    for number, rid in enumerate("abcde"):
        driver.submit(rid, list(range(100 * number, 100 * number + 12)))
    driver.run()
    for number, rid in enumerate("abcde"):
        for completion in range(3):
            start = 100 * number + 12
            assert driver.told[ONE, rid, completion] == list(range(start, start + 10))
    driver.leave(*"abcde")


def test_a_completion_that_outgrows_the_whole_kv_ends_early() -> None:
    driver = DrafterDriver(ScriptedModel(tokens=20))
    driver.submit("a", list(range(12)), completions=2, max_new_tokens=50)
    driver.submit("b", list(range(40, 45)), completions=1)
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(12, 21))
    assert driver.told[ONE, "a", 1] == list(range(12, 21))
    assert driver.told[ONE, "b", 0] == list(range(45, 55))
    driver.leave("a", "b")


def test_a_repeated_submission_starts_again() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", [1, 2, 3])
    driver.step(3)
    driver.told.clear()
    driver.submit("a", [1, 2, 3, 9])
    driver.run()
    assert driver.told[ONE, "a", 1] == list(range(10, 20))
    driver.leave("a")


@pytest.mark.parametrize("apart", [True, False])
def test_first_completions_can_have_passes_of_their_own(apart: bool) -> None:
    driver = DrafterDriver(ScriptedModel(), slots=8, apart=apart)
    for rid, prompt in (("a", [1, 2]), ("b", [3, 4])):
        driver.submit(rid, prompt, completions=3, max_new_tokens=6)
    lengths = []
    while not driver.drafter.idle:
        driver.drafter.step()
        driver.collect()
        prompts = driver.drafter.queue.prompts.values()
        lengths.append([[len(c.token_ids) for c in prompt.completions] for prompt in prompts])
    others_began = next(i for i, each in enumerate(lengths) if max(each[0][1:]) > 1)
    firsts_then = [each[0] for each in lengths[others_began - 1]]
    assert (firsts_then == [6, 6]) is apart


def test_with_apart_a_pass_ends_before_another_kind_of_work() -> None:
    """The completion of the served request is a first one too, but behind all others."""
    driver = DrafterDriver(ScriptedModel(), apart=True)
    driver.submit("served", [1, 2, 3], completions=1)
    driver.admit("served")
    driver.submit("waits", [7, 8, 9], completions=2)
    driver.step(4)
    assert driver.model.passes[-1] == ("step", 1, 1)
    assert len(driver.told[ONE, "waits", 0]) > 1
    assert not driver.told[ONE, "served", 0]
    driver.leave("served", "waits")
