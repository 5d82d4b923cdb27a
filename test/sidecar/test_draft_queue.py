import pytest

from sglang_qspec.link import Peer
from sglang_qspec.policy.draft_worth import DEEPEST, REFRESH, Purpose
from sglang_qspec.sidecar.draft_queue import DraftQueue
from sglang_qspec.sidecar.prompt import Prompt
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.subscription import StepDraft
from sglang_qspec.sidecar.text import Completion, Place, tokens_of

PEER = Peer("one", b"1")


def queue(drafts: DraftQueue, name: str, place: Place | None, completions: int = 3) -> Prompt:
    prompt = Prompt((name,), tokens_of([1]), frozenset(), 10, [GREEDY] * completions, owner=PEER)
    prompt.subscribe((PEER, 0), 0, place)
    drafts.arrange(prompt)
    drafts.check_integrity()
    return prompt


def order(drafts: DraftQueue, *, by_worth: bool = False) -> list[str]:
    """The name of the prompt and the number of each completion, in order; `step` for steps."""
    names = []
    for completion in drafts.worthiest() if by_worth else drafts.urgent():
        text = completion.text
        name = text.key[0] if isinstance(text, Prompt) else "step"
        names.append(f"{name}{completion.index}")
    return names


def finish(drafts: DraftQueue, completion: Completion) -> None:
    completion.finished = True
    drafts.arrange(completion.text)
    drafts.check_integrity()


def test_smaller_ranks_come_first_and_equal_ranks_in_arrival_order() -> None:
    drafts = DraftQueue()
    queue(drafts, "a", ((5, 0), 1), 1)
    queue(drafts, "b", ((5, -9), 2), 1)
    queue(drafts, "c", ((1, 0), 3), 1)
    queue(drafts, "d", ((5, 0), 4), 1)
    assert order(drafts) == ["c0", "b0", "a0", "d0"]


def test_the_next_prompt_gets_all_completions_before_distant_prompts_get_their_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = 8
    monkeypatch.setattr("sglang_qspec.sidecar.draft_queue.PROMPTS_AHEAD", ahead)
    drafts = DraftQueue()
    prompts = [queue(drafts, chr(97 + i), ((0, 0), i), 2) for i in range(ahead + 3)]
    firsts = [f"{chr(97 + i)}0" for i in range(ahead)]
    assert order(drafts)[: ahead + 5] == [*firsts, "a1", "i0", "b1", "j0", "c1"]
    finish(drafts, prompts[0].completions[1])
    assert order(drafts)[: ahead + 1] == [*firsts, "i0"]
    finish(drafts, prompts[0].completions[0])  # the prompt is complete: the others move up
    assert order(drafts)[: ahead + 1] == [*firsts[1:], "i0", "b1"]


def test_step_drafts_come_before_all_completions() -> None:
    drafts = DraftQueue()
    served = queue(drafts, "s", None)
    queue(drafts, "a", ((0, 0), 1), 2)
    subscription = served.subscriptions[PEER, 0]
    steps = [StepDraft(served, (PEER, 0), subscription, 10) for _ in range(2)]
    for step in steps:
        drafts.begin(step)
    assert order(drafts) == ["step0", "step0", "a0", "a1", "s0", "s1", "s2"]
    assert [each.text for each in drafts.urgent()][:2] == steps
    drafts.remove(steps[1])
    assert order(drafts)[:3] == ["step0", "a0", "a1"]
    assert next(drafts.urgent()).text is steps[0]


def test_first_completions_and_then_the_shortest_come_first_among_served_prompts() -> None:
    drafts = DraftQueue()
    long, short = queue(drafts, "l", None, 2), queue(drafts, "s", None, 2)
    for prompt, size in ((long, 6), (short, 2)):
        for completion in prompt.completions:
            completion.token_ids.extend([7] * size)
    assert order(drafts) == ["s0", "l0", "s1", "l1"]


def test_a_prompt_has_the_rank_of_its_first_request() -> None:
    drafts = DraftQueue()
    shared = queue(drafts, "a", ((0, 0), 2), 1)
    queue(drafts, "b", ((0, 0), 1), 1)
    shared.subscribe((PEER, 1), 0, ((-1, 0), 3))
    drafts.arrange(shared)
    drafts.check_integrity()
    assert order(drafts) == ["a0", "b0"]
    shared.unsubscribe((PEER, 1))
    drafts.arrange(shared)
    drafts.check_integrity()
    assert order(drafts) == ["b0", "a0"]
    drafts.remove(shared)
    drafts.check_integrity()
    assert order(drafts) == ["b0"]


def test_the_work_that_is_worth_most_comes_first() -> None:
    drafts = DraftQueue()
    served = queue(drafts, "s", None, 1)
    for place, name in enumerate("ab"):
        queue(drafts, name, ((0, 0), place), 2)
    drafts.begin(StepDraft(served, (PEER, 0), served.subscriptions[PEER, 0], 10))
    urgent = ["step0", "a0", "b0", "a1", "b1", "s0"]
    assert order(drafts) == order(drafts, by_worth=True) == urgent

    def judge(purpose: Purpose, *, saved: bool) -> None:
        for position in range(DEEPEST + 1):
            for _ in range(100):
                drafts.worth.judge(purpose, position, saved=saved)
        for _ in range(REFRESH):
            drafts.worth.fade()

    judge(Purpose.STEP, saved=False)
    assert order(drafts, by_worth=True) == ["a0", "b0", "a1", "b1", "step0", "s0"]
    judge(Purpose.SERVED, saved=True)
    assert order(drafts, by_worth=True)[:3] == ["s0", "a0", "b0"]
    assert order(drafts) == urgent, "rows are taken in the order of urgency"
