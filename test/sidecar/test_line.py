import pytest

from sglang_qspec.link import Peer
from sglang_qspec.sidecar.line import Line
from sglang_qspec.sidecar.prompt import Completion, Place, Prompt
from sglang_qspec.sidecar.sampling import GREEDY

PEER = Peer("one", b"1")


def queue(line: Line, name: str, place: Place | None, completions: int = 3) -> Prompt:
    prompt = Prompt((name,), [1], frozenset(), 10, [GREEDY] * completions)
    prompt.subscribe((PEER, name, 0), 0, place)
    line.add(prompt)
    line.check_integrity()
    return prompt


def order(line: Line) -> list[str]:
    """Each completion as its prompt's name and its own number."""
    return [f"{completion.prompt.key[0]}{completion.index}" for completion in line.urgent()]


def finish(line: Line, completion: Completion) -> None:
    line.finish(completion)
    line.check_integrity()


def test_smaller_ranks_come_first_and_equal_ones_as_they_arrive() -> None:
    line = Line()
    queue(line, "a", ((5, 0), 1), 1)
    queue(line, "b", ((5, -9), 2), 1)
    queue(line, "c", ((1, 0), 3), 1)
    queue(line, "d", ((5, 0), 4), 1)
    assert order(line) == ["c0", "b0", "a0", "d0"]


def test_the_next_prompt_gets_the_rest_before_those_far_behind_get_their_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookahead = 8
    monkeypatch.setattr("sglang_qspec.sidecar.line.LOOKAHEAD", lookahead)
    line = Line()
    prompts = [queue(line, chr(97 + i), ((0, 0), i), 2) for i in range(lookahead + 3)]
    firsts = [f"{chr(97 + i)}0" for i in range(lookahead)]
    assert order(line)[: lookahead + 5] == [*firsts, "a1", "i0", "b1", "j0", "c1"]
    finish(line, prompts[0].completions[1])
    assert order(line)[: lookahead + 1] == [*firsts, "i0"]
    finish(line, prompts[0].completions[0])  # the prompt is done: the others move up
    assert order(line)[: lookahead + 1] == [*firsts[1:], "i0", "b1"]


def test_step_drafts_come_before_all_else() -> None:
    line = Line()
    served = queue(line, "s", None)
    queue(line, "a", ((0, 0), 1), 2)
    for name in "xy":
        step = Prompt((name,), [1], frozenset(), 10, [GREEDY], parent=served)
        step.subscribe((PEER, name, 0), 0, None)
        line.begin(step)
    assert order(line) == ["x0", "y0", "a0", "a1", "s0", "s1", "s2"]
    line.withdraw(step)
    assert order(line)[:3] == ["x0", "a0", "a1"]


def test_of_served_prompts_the_first_completions_and_the_shortest_come_first() -> None:
    line = Line()
    long, short = queue(line, "l", None, 2), queue(line, "s", None, 2)
    for prompt, size in ((long, 6), (short, 2)):
        for completion in prompt.completions:
            completion.token_ids += [7] * size
    assert order(line) == ["s0", "l0", "s1", "l1"]


def test_a_prompt_stands_where_the_first_of_its_requests_does_and_moves_with_it() -> None:
    line = Line()
    shared = queue(line, "a", ((0, 0), 2), 1)
    queue(line, "b", ((0, 0), 1), 1)
    shared.subscribe((PEER, "urgent", 1), 0, ((-1, 0), 3))
    line.arrange(shared)
    line.check_integrity()
    assert order(line) == ["a0", "b0"]
    del shared.subscriptions[PEER, "urgent", 1]
    line.arrange(shared)
    line.check_integrity()
    assert order(line) == ["b0", "a0"]
    line.remove(shared)
    line.check_integrity()
    assert order(line) == ["b0"]
