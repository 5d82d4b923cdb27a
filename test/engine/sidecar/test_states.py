"""A head gets the states of its requests, and is asked for no queue drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import Delivery, FakeSidecarLink
from sglang_qspec.messages import MAX_STATE_BYTES, States, ToSidecar
from sglang_qspec.trie import Source
from test.engine.speculating import PROMPT, commits, counting, enqueue, make, poll

WIDTH = 4096
EACH = MAX_STATE_BYTES // (2 * WIDTH)
"""States in a message."""
SHOWN = np.arange((2 * EACH + 1) * WIDTH, dtype=np.int16).reshape(-1, WIDTH)


def served(link: FakeSidecarLink, *, has_model: bool = False) -> Speculator:
    active = make(link, of_head=True, has_model=has_model)
    poll(active)
    enqueue(active)
    poll(active)
    active.admit("a")
    return active


def test_states_are_sent_in_parts_before_the_tokens() -> None:
    link = FakeSidecarLink(counting)
    active = served(link)
    active.show_states("a", 5, SHOWN)
    (submit,) = link.submits
    assert [each.start for each in link.states] == [5, 5 + EACH, 5 + 2 * EACH]
    assert {each.submission for each in link.states} == {submit.submission}
    assert b"".join(each.data for each in link.states) == SHOWN.tobytes()
    assert not commits(link)


def test_a_head_is_asked_for_steps_alone() -> None:
    link = FakeSidecarLink(counting)
    active = served(link)
    (submit,) = link.submits
    assert (submit.token_ids, submit.completions) == (PROMPT, 0)
    active.propose(["a"], [[8]], 4)
    assert [commit.token_ids for commit in commits(link)] == [[8]]


def test_a_head_beside_a_draft_model_is_asked_for_steps_and_the_model_for_completions() -> None:
    link = FakeSidecarLink(counting)
    active = served(link, has_model=True)
    (submit,) = link.submits
    assert submit.completions > 0
    active.propose(["a"], [[8]], 4)
    assert [commit.token_ids for commit in commits(link)] == [[8]]
    trees = active.propose(["a"], [[8, 9]], 4)
    assert set(trees.sources[0, 1 : trees.sizes[0]].tolist()) == {Source.QUEUE}


def test_states_without_a_submission_are_dropped() -> None:
    link = FakeSidecarLink(counting)
    active = served(link)
    active.show_states("other", 0, SHOWN)
    active.end("a")
    active.show_states("a", 0, SHOWN)
    assert not link.states
    enqueue(active)
    link.die()
    poll(active)
    active.show_states("a", 0, SHOWN)
    assert not link.states


def test_behind_states_that_the_link_does_not_take_none_are_sent() -> None:
    link = FakeSidecarLink(counting)
    active = served(link)
    send: Callable[[ToSidecar], Delivery] = link.send
    tried: list[Any] = []

    def full(message: ToSidecar) -> Delivery:
        if isinstance(message, States):
            tried.append(message)
            return send(message) if len(tried) == 1 else Delivery.LATER
        return send(message)

    link.send = full  # type: ignore[method-assign]
    active.show_states("a", 0, SHOWN)
    assert (len(tried), len(link.states)) == (2, 1)
