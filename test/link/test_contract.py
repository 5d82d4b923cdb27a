"""What any `Link` promises, over the fake and over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_qspec.link import Delivery, Keys, LinkState
from sglang_qspec.messages import Close, Commit, Commits, Drafted, FromSidecar, Submit
from test.link.ends import Ends, FakeEnds, WireEnds, collect, ready
from test.link.wire import VOCAB_SIZE, open_wire, until


def count_up(submit: Submit) -> list[list[int]]:
    """Two completions that count on from the last token, upwards and downwards."""
    last = submit.token_ids[-1]
    return [[last + 1, last + 2, last + 3, last + 4], [last - 1, last - 2]]


def submit(number: int, last: int = 10) -> Submit:
    return Submit(number, [1, last], 0, max_new_tokens=8, completions=2, temperature=0.5)


def drafts_of(message: Submit) -> list[Drafted]:
    number, last = message.submission, message.token_ids[-1]
    return [
        Drafted(number, 0, 0, 0, [last + 1, last + 2]),
        Drafted(number, 0, 0, 2, [last + 3, last + 4], finished=True),
        Drafted(number, 1, 0, 0, [last - 1, last - 2], finished=True),
    ]


@pytest.fixture(params=["fake", "ipc", "tcp"])
def ends(request: pytest.FixtureRequest, key_file: Keys) -> Iterator[Ends]:
    if request.param == "fake":
        yield FakeEnds(count_up)
        return
    with open_wire(request.param, key_file) as wire:
        yield WireEnds(wire, count_up)


def test_nothing_is_taken_before_the_sidecar_has_answered(ends: Ends) -> None:
    assert ends.link.state is LinkState.CONNECTING
    assert ends.link.session_count == 0
    assert ends.link.sidecar is None
    assert not ends.link.send(submit(1))
    assert ends.link.dropped == 1


def test_a_ready_link_knows_its_sidecar(ends: Ends) -> None:
    ready(ends)
    assert ends.link.session_count == 1
    assert ends.link.refusal is None
    assert ends.link.sidecar is not None
    assert ends.link.sidecar.vocab_size == VOCAB_SIZE


def test_drafts_flow_in_order(ends: Ends) -> None:
    ready(ends)
    asked = [submit(1, last=10), submit(2, last=30)]
    assert all(ends.link.send(message) for message in asked)
    received = collect(ends, 6)
    for message in asked:
        drafts = [draft for draft in received if draft.submission == message.submission]
        assert drafts == drafts_of(message)
    assert ends.link.dropped == ends.link.malformed == 0


def test_a_receive_never_gives_more_than_its_limit(ends: Ends) -> None:
    ready(ends)
    assert ends.link.send(submit(1))
    pieces: list[list[FromSidecar]] = []

    def step() -> None:
        ends.serve()
        pieces.append(ends.link.receive(limit=1))

    until(lambda: sum(map(len, pieces)) == 3, step)
    assert max(map(len, pieces)) == 1
    assert [draft for piece in pieces for draft in piece] == drafts_of(submit(1))


def test_a_close_reaches_the_sidecar(ends: Ends) -> None:
    ready(ends)
    assert ends.link.send(submit(1))
    assert ends.link.send(Close(1))
    until(lambda: ends.closes, ends.step)
    assert ends.closes == [Close(1)]


@pytest.mark.parametrize(
    "bad",
    [
        Drafted(1, 0, 0, 0, [1, VOCAB_SIZE]),
        Drafted(1, 0, 0, 0, [-1]),
        Drafted(1, -1, 0, 0, [1]),
        Drafted(1, 0, -1, 0, [1]),
        Drafted(1, 0, 0, -1, [1]),
        Drafted(1, 0, 1 << 40, 0, [1]),
        Drafted(-1, 0, 0, 0, [1]),
        Drafted(1, 0, 0, 0, [1] * 513),
    ],
    ids=["vocabulary", "token", "completion", "base", "start", "huge", "submission", "long"],
)
def test_a_draft_that_makes_no_sense_never_comes_out(ends: Ends, bad: Drafted) -> None:
    ready(ends)
    good = Drafted(1, 0, 0, 0, [0, VOCAB_SIZE - 1])
    ends.inject(bad)
    ends.inject(good)
    assert collect(ends, 1) == [good]
    assert ends.link.malformed == 1
    assert ends.link.state is LinkState.READY


def test_drafts_of_unknown_requests_and_old_bases_are_left_to_the_caller(ends: Ends) -> None:
    ready(ends)
    foreign = Drafted(77, 0, 0, 0, [1])
    stale = Drafted(1, 0, 12, 0, [1])
    ends.inject(foreign)
    ends.inject(stale)
    assert collect(ends, 2) == [foreign, stale]


def test_a_dead_sidecar_is_noticed_and_its_successor_knows_nothing(ends: Ends) -> None:
    ready(ends)
    ends.die()
    until(lambda: ends.link.state is LinkState.LOST, ends.step)
    assert not ends.link.send(submit(1))
    assert not ends.link.send(Close(1))
    ends.revive()
    ready(ends)
    assert ends.link.session_count == 2
    assert ends.link.send(submit(2))
    assert collect(ends, 3) == drafts_of(submit(2))


def test_a_sidecar_that_is_replaced_at_once_is_a_new_generation(ends: Ends) -> None:
    ready(ends)
    ends.revive()
    until(lambda: ends.link.session_count == 2, ends.step)
    ready(ends)


def test_a_refused_link_says_why_and_takes_nothing_until_another_sidecar_comes(ends: Ends) -> None:
    ready(ends)
    ends.refuse()
    until(lambda: ends.link.state is LinkState.REFUSED, ends.step)
    assert ends.link.refusal is not None
    assert "vocabulary" in ends.link.refusal
    assert not ends.link.send(submit(1))
    ends.revive()
    ready(ends)
    assert ends.link.refusal is None
    assert ends.link.session_count == 2


@pytest.mark.parametrize(
    "message",
    [
        Submit(1, [object()], 0, 8, 2, 0.5),
        Submit(1 << 70, [1], 0, 8, 2, 0.5),
        Submit(1, [VOCAB_SIZE - 1] * (9 << 20), 0, 8, 2, 0.5),
    ],
    ids=["object", "huge", "long"],
)
def test_a_message_that_cannot_go_out_is_not_to_be_tried_again(ends: Ends, message: Submit) -> None:
    ready(ends)
    assert ends.link.send(message) is Delivery.NEVER
    assert ends.link.send(submit(2))
    assert collect(ends, 3) == drafts_of(submit(2))
    assert ends.link.state is LinkState.READY
    assert ends.link.session_count == 1


def test_a_message_about_commits_is_taken(ends: Ends) -> None:
    ready(ends)
    assert ends.link.send(Commits([Commit(1, 3, [1, 2], 5), Commit(2, 0, [3], 9)]))
    assert ends.link.send(submit(1))
    assert collect(ends, 3) == drafts_of(submit(1))
    assert ends.link.malformed == 0


def test_a_closed_link_is_silent(ends: Ends) -> None:
    ready(ends)
    ends.link.close()
    ends.link.close()
    assert ends.link.receive() == []
    assert not ends.link.send(submit(1))
    assert ends.link.state is not LinkState.READY
