"""The faults that the fake can inject."""

from __future__ import annotations

from typing import Any

from sglang_qspec.link import FakeSidecarLink, LinkState
from sglang_qspec.messages import Close, Drafted, Ping, Submit


def twelve(submit: Submit) -> list[list[int]]:
    return [list(range(12))]


def submit(number: int = 1, max_new_tokens: int = 100) -> Submit:
    return Submit(number, [7], 0, max_new_tokens, completions=1, temperature=0.5)


def opened(**settings: Any) -> FakeSidecarLink:
    link = FakeSidecarLink(twelve, vocab_size=100, **settings)
    link.receive()
    assert link.state is LinkState.READY
    return link


def drafts(link: FakeSidecarLink) -> list[Drafted]:
    """Poll the link; its messages must all be drafts."""
    received = link.receive()
    drafted = [message for message in received if isinstance(message, Drafted)]
    assert drafted == received
    return drafted


def tokens(received: list[Drafted]) -> list[int]:
    return [token_id for drafted in received for token_id in drafted.token_ids]


def test_a_completion_arrives_in_chunks_and_the_last_is_marked_finished() -> None:
    link = opened(chunk=5)
    assert link.send(submit())
    received = drafts(link)
    assert [drafted.start for drafted in received] == [0, 5, 10]
    assert [drafted.finished for drafted in received] == [False, False, True]
    assert tokens(received) == list(range(12))


def test_a_completion_is_no_longer_than_max_new_tokens() -> None:
    link = opened()
    assert link.send(submit(max_new_tokens=6))
    received = drafts(link)
    assert tokens(received) == list(range(6))
    assert received[-1].finished


def test_an_interval_spreads_the_chunks_over_polls_and_a_delay_shifts_them() -> None:
    link = opened(chunk=4, interval=2, delay=3)
    assert link.send(submit())
    counts = [len(link.receive()) for _ in range(9)]
    assert counts == [0, 0, 0, 1, 0, 1, 0, 1, 0]


def test_after_a_close_only_the_drafts_in_flight_arrive() -> None:
    link = opened(chunk=4, interval=2, delay=3)
    assert link.send(submit())
    link.receive()
    assert link.send(Close(1))
    late = [drafted for _ in range(12) for drafted in drafts(link)]
    assert tokens(late) == [0, 1, 2, 3]


def test_a_truncated_completion_never_finishes() -> None:
    link = opened()
    link.truncate_to = 6
    assert link.send(submit())
    received = drafts(link)
    assert tokens(received) == list(range(6))
    assert not any(drafted.finished for drafted in received)


def test_dropped_drafts_never_arrive() -> None:
    link = opened()
    link.drop_all = True
    assert link.send(submit())
    link.drop_all = False
    assert link.receive() == []
    assert link.send(submit(2))
    assert {drafted.submission for drafted in drafts(link)} == {2}


def test_a_full_queue_accepts_no_message() -> None:
    link = opened()
    link.queue_full = True
    assert not link.send(submit())
    assert link.dropped == 1
    assert link.submits == []


def test_reordering_shuffles_and_loses_nothing() -> None:
    link = opened(chunk=1)
    assert link.send(submit())
    link.reorder(seed=1)
    shuffled = tokens(drafts(link))
    assert shuffled != list(range(12))
    assert sorted(shuffled) == list(range(12))


def test_duplicated_drafts_arrive_twice() -> None:
    link = opened(chunk=12)
    assert link.send(submit())
    link.duplicate()
    assert tokens(drafts(link)) == 2 * list(range(12))


def test_a_death_loses_the_drafts_in_flight() -> None:
    link = opened(delay=2)
    assert link.send(submit())
    link.die()
    assert link.state is LinkState.LOST
    link.revive()
    assert [link.receive() for _ in range(5)] == [[]] * 5
    assert link.session_count == 2


def test_bytes_that_are_no_message_are_counted() -> None:
    link = opened()
    link.inject_frame(b"\xc1")
    assert link.receive() == []
    assert link.malformed == 1


def test_a_heartbeat_answers_a_ping() -> None:
    link = opened()
    assert link.send(Ping(number=3))
    assert link.receive() == []
    assert link.heartbeat is not None
    assert link.heartbeat.answers == 3
