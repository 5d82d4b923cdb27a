"""Whether drafts from texts would have been right, which rounds without drafts ask for."""

from __future__ import annotations

from sglang_qspec.engine.passes.leader import LONG_MATCH, Leader
from sglang_qspec.link import FakeSidecarLink
from test.engine.simulation import Clock
from test.engine.speculating import connect, enqueue


def test_long_matches_of_half_of_the_requests_promise_drafts(
    link: FakeSidecarLink, clock: Clock
) -> None:
    text = list(range(10, 40))
    active = connect(link, clock)
    leader = Leader.__new__(Leader)
    leader.speculator = active
    for rid in "ab":
        enqueue(active, rid, prompt_ids=[*text, 5], output_ids=[], max_new_tokens=50)
    answers = {"a": text[: LONG_MATCH - 1], "b": [7, 8, 9]}
    active.follow(list(answers), list(answers.values()))
    assert not leader._promises(["a", "b"])
    answers["a"] = text[: LONG_MATCH + 1]
    active.follow(list(answers), list(answers.values()))
    assert leader._promises(["a", "b"])
    assert not leader._promises(["a", "b", "unknown"])
