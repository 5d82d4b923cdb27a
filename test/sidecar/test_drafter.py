import pytest

from test.sidecar.desk import ONE, TWO, Desk
from test.sidecar.scripted import ScriptedModel


def test_each_completion_follows_the_model_up_to_max_new_tokens() -> None:
    desk = Desk(ScriptedModel())
    desk.submit("a", [1, 2, 3], base_len=2)
    desk.run()
    for completion in range(3):
        assert desk.told[ONE, "a", completion] == list(range(4, 14))
    assert len(desk.finished) == 3
    assert desk.base_lens["a"] == 2
    assert desk.drafter.drafted_tokens == 30
    desk.leave("a")


def test_the_first_token_comes_at_once_and_the_rest_in_pieces() -> None:
    desk = Desk(ScriptedModel())
    desk.submit("a", [1, 2, 3])
    desk.step()
    assert [desk.told[ONE, "a", i] for i in range(3)] == [[4]] * 3
    desk.step()
    assert desk.told[ONE, "a", 0] == [4]
    desk.step(2)
    assert desk.told[ONE, "a", 0] == [4, 5, 6, 7]
    desk.leave("a")


def test_equal_prompts_are_drafted_once_for_all_their_requests() -> None:
    desk = Desk(ScriptedModel(), share=True)
    desk.submit("a", [1, 2, 3])
    desk.submit("b", [1, 2, 3], peer=TWO)
    desk.submit("c", [1, 2, 3], completions=2)
    desk.run()
    assert desk.told[TWO, "b", 2] == desk.told[ONE, "a", 2] == list(range(4, 14))
    assert desk.told[ONE, "c", 1] == list(range(4, 14))
    assert desk.drafter.drafted_tokens == 50
    desk.leave("a", "c")


def test_requests_that_wait_come_before_those_that_are_served() -> None:
    desk = Desk(ScriptedModel(), slots=3)
    desk.submit("served", [1, 2, 3])
    desk.step(2)
    desk.admit("served")
    desk.admit("unknown")
    desk.submit("waits", [4, 5, 6])
    desk.step(12)
    assert len(desk.told[ONE, "waits", 2]) == 10
    assert len(desk.told[ONE, "served", 2]) < 10
    desk.run()
    assert len(desk.told[ONE, "served", 2]) == 10
    desk.leave("served", "waits")


def test_a_prompt_is_urgent_as_long_as_one_of_its_requests_waits() -> None:
    desk = Desk(ScriptedModel(), slots=1)
    desk.submit("first", [1, 2, 3], completions=1)
    desk.submit("other", [4, 5, 6], completions=1)
    desk.admit("first")
    desk.submit("second", [1, 2, 3], completions=1)  # in line again, behind the other
    desk.submit("third", [7, 8, 9], completions=1)
    desk.step(22)
    assert len(desk.told[ONE, "second", 0]) == len(desk.told[ONE, "other", 0]) == 10
    assert len(desk.told[ONE, "third", 0]) < 10
    desk.leave("first", "other", "second", "third")


def test_a_prompt_is_deferred_when_the_last_of_its_requests_that_waits_is_gone() -> None:
    desk = Desk(ScriptedModel(), slots=3)
    desk.submit("first", [1, 2, 3])
    desk.submit("second", [1, 2, 3])
    desk.admit("first")
    desk.close("second")
    desk.submit("other", [4, 5, 6])
    desk.step(12)
    assert len(desk.told[ONE, "other", 2]) == 10
    assert len(desk.told[ONE, "first", 2]) < 10
    desk.run()
    desk.leave("first", "other")


def test_a_late_request_gets_at_once_what_exists_and_then_the_rest() -> None:
    desk = Desk(ScriptedModel(), share=True)
    desk.submit("a", [1, 2, 3])
    desk.step(6)
    desk.submit("b", [1, 2, 3], peer=TWO)
    assert desk.told[TWO, "b", 0] == list(range(4, 10))
    desk.run()
    desk.submit("c", [1, 2, 3])
    assert desk.told[TWO, "b", 2] == desk.told[ONE, "c", 2] == list(range(4, 14))
    assert (ONE, "c", 0) in desk.finished
    assert desk.drafter.drafted_tokens == 30
    desk.leave("a", "c")


def test_greedy_completions_of_all_prompts_come_before_sampled_ones() -> None:
    desk = Desk(ScriptedModel(), slots=1)
    for number, rid in enumerate("abc"):
        desk.submit(rid, [100 * number, 100 * number + 1])
    desk.run()
    order = [(rid, completion) for _, rid, completion in desk.finished]
    assert order[:3] == [("a", 0), ("b", 0), ("c", 0)]
    assert order[3:] == [(rid, completion) for rid in "abc" for completion in (1, 2)]
    desk.leave("a", "b", "c")


def test_prompts_are_drafted_in_the_order_of_their_ranks() -> None:
    desk = Desk(ScriptedModel(), slots=1)
    for number, (rid, rank) in enumerate({"a": (1, 0), "b": (-5, 0), "c": (1, -3)}.items()):
        desk.submit(rid, [100 * number, 100 * number + 1], completions=1, rank=rank)
    desk.run()
    assert [rid for _, rid, _ in desk.finished] == ["b", "c", "a"]
    desk.leave("a", "b", "c")


def test_without_a_greedy_one_all_completions_are_sampled_from_the_first_token_on() -> None:
    model = ScriptedModel()
    model.certainty = 0.0  # all tokens are as likely
    desk = Desk(model)
    desk.submit("a", [1, 2, 3])
    desk.submit("b", [1, 2, 3], greedy_first=False)
    desk.run()
    assert desk.told[ONE, "a", 0] == [0] * 10  # the lowest id of the likeliest
    assert desk.told[ONE, "b", 0] != [0] * 10
    assert desk.told[ONE, "b", 0] != desk.told[ONE, "b", 1] == desk.told[ONE, "a", 1]
    desk.leave("a", "b")


def test_a_newcomers_greedy_completion_overtakes_and_the_paused_one_goes_on() -> None:
    desk = Desk(ScriptedModel(), slots=3)
    desk.submit("a", [1, 2, 3], max_new_tokens=50)
    desk.step(5)
    desk.submit("b", [200, 201], completions=1)
    desk.run()
    assert desk.finished[0] == (ONE, "b", 0)
    assert desk.told[ONE, "a", 2] == list(range(4, 54))
    assert max(rows for verb, rows, _ in desk.model.passes if verb == "step") == 3
    desk.leave("a", "b")


def test_close_stops_the_work_and_frees_kv_at_once() -> None:
    desk = Desk(ScriptedModel())
    desk.submit("a", [1, 2, 3])
    desk.submit("b", [1, 2, 3], peer=TWO)
    desk.step(3)
    desk.close("a")
    desk.step(3)
    assert (ONE, "a", 0) not in desk.finished
    assert not desk.drafter.idle
    desk.close("b", TWO)
    assert desk.drafter.idle
    assert desk.model.free_tokens == desk.model.total_tokens
    desk.close("unknown")
    desk.leave()


def test_a_server_that_is_gone_is_drafted_for_no_more() -> None:
    desk = Desk(ScriptedModel())
    desk.submit("a", [1, 2, 3])
    for rid in "bcd":
        desk.submit(rid, [7, 8], peer=TWO)
    desk.step(2)
    desk.drafter.drop(TWO)
    assert desk.drafter.requests == 1
    desk.run()
    assert desk.told[ONE, "a", 0] == list(range(4, 14))
    desk.leave("a")


def test_a_completion_ends_at_a_stop_token_or_the_models_end() -> None:
    desk = Desk(ScriptedModel(eos_token_ids=[30]))
    desk.submit("stop", [1, 2, 3], stop=[6])
    desk.submit("eos", [27, 28])
    desk.submit("on", [27, 28], ignore_eos=True)
    desk.submit("first", [28, 29])
    desk.run()
    assert desk.told[ONE, "stop", 1] == [4, 5, 6]
    assert desk.told[ONE, "eos", 1] == [29, 30]
    assert desk.told[ONE, "on", 1] == list(range(29, 39))
    assert desk.told[ONE, "first", 2] == [30]
    desk.leave("stop", "eos", "on", "first")


def test_lengths_are_capped_by_the_setting_and_by_the_context() -> None:
    desk = Desk(ScriptedModel(context_len=40), max_completion_tokens=6)
    desk.submit("setting", [1, 2, 3])
    desk.submit("context", [1] * 37)
    desk.submit("nothing", [2, 3], max_new_tokens=0)
    desk.run()
    assert len(desk.told[ONE, "setting", 0]) == 6
    assert len(desk.told[ONE, "context", 2]) == 3
    assert len(desk.finished) == 9
    desk.leave("setting", "context", "nothing")


@pytest.mark.parametrize("token_ids", [[], [1] * 40, [1] * 41, [1] * 500])
def test_nothing_is_kept_of_a_prompt_that_cannot_fit(token_ids: list[int]) -> None:
    desk = Desk(ScriptedModel(context_len=40))
    desk.submit("a", token_ids)
    assert list(desk.declined) == ["a"]
    assert desk.drafter.texts == desk.drafter.requests == 0
    assert desk.drafter.idle
    desk.leave("a")


def test_long_prompts_are_read_in_pieces_between_which_others_advance() -> None:
    desk = Desk(ScriptedModel(), prefill_tokens=10)
    desk.submit("a", [1, 2, 3])
    desk.step(2)
    desk.submit("b", list(range(100, 135)))
    desk.step(3)
    assert desk.model.passes[-6:] == [("extend", 1, 10), ("step", 3, 3)] * 3
    desk.run()
    assert desk.told[ONE, "b", 2] == list(range(135, 145))
    desk.leave("a", "b")


def test_a_common_beginning_of_prompts_is_read_once() -> None:
    desk = Desk(ScriptedModel())
    system = list(range(100, 150))
    for number, rid in enumerate("abc"):
        desk.submit(rid, [*system, number])
    desk.run()
    assert sum(tokens for verb, _, tokens in desk.model.passes if verb == "extend") <= 51 + 1
    for number, rid in enumerate("abc"):
        for completion in range(3):
            assert desk.told[ONE, rid, completion] == list(range(number + 1, number + 11))
    desk.leave("a", "b", "c")


@pytest.mark.parametrize(("tokens", "rows"), [(100, 64), (45, 64), (30, 64), (400, 3), (60, 4)])
def test_short_kv_costs_time_but_no_tokens(tokens: int, rows: int) -> None:
    desk = Desk(ScriptedModel(tokens=tokens, rows=rows), prefill_tokens=8)
    for number, rid in enumerate("abcde"):
        desk.submit(rid, list(range(100 * number, 100 * number + 12)))
    desk.run()
    for number, rid in enumerate("abcde"):
        for completion in range(3):
            start = 100 * number + 12
            assert desk.told[ONE, rid, completion] == list(range(start, start + 10))
    desk.leave(*"abcde")


def test_a_completion_that_alone_outgrows_the_kv_ends_with_what_it_has() -> None:
    desk = Desk(ScriptedModel(tokens=20))
    desk.submit("a", list(range(12)), completions=2, max_new_tokens=50)
    desk.submit("b", list(range(40, 45)), completions=1)
    desk.run()
    assert desk.told[ONE, "a", 0] == list(range(12, 21))
    assert desk.told[ONE, "a", 1] == list(range(12, 21))
    assert desk.told[ONE, "b", 0] == list(range(45, 55))
    desk.leave("a", "b")


def test_a_request_that_is_sent_again_starts_anew() -> None:
    desk = Desk(ScriptedModel())
    desk.submit("a", [1, 2, 3])
    desk.step(3)
    desk.told.clear()
    desk.submit("a", [1, 2, 3, 9])
    desk.run()
    assert desk.told[ONE, "a", 1] == list(range(10, 20))
    desk.leave("a")


@pytest.mark.parametrize("apart", [True, False])
def test_first_completions_may_be_kept_apart_from_others(apart: bool) -> None:
    desk = Desk(ScriptedModel(), slots=8, apart=apart)
    for rid, prompt in (("a", [1, 2]), ("b", [3, 4])):
        desk.submit(rid, prompt, completions=3, max_new_tokens=6)
    lengths = []
    while not desk.drafter.idle:
        desk.drafter.step()
        desk.collect()
        prompts = desk.drafter._turns.prompts.values()
        lengths.append([[len(c.token_ids) for c in prompt.completions] for prompt in prompts])
    others_began = next(i for i, each in enumerate(lengths) if max(each[0][1:]) > 1)
    firsts_then = [each[0] for each in lengths[others_began - 1]]
    assert (firsts_then == [6, 6]) is apart
