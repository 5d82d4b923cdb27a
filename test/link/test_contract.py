"""The contract of `Link`, tested on the fake and on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from sglang_qspec.link import Delivery, Keys, LinkState
from sglang_qspec.messages import Close, Commit, Commits, Drafted, FromSidecar, Submit
from test.link.link_pair import FakeLinkPair, LinkPair, WireLinkPair, collect, ready
from test.link.wire import VOCAB_SIZE, open_wire, until


def count_up(submit: Submit) -> list[list[int]]:
    """Two completions that count up and down from the last token."""
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
def pair(request: pytest.FixtureRequest, key_file: Keys) -> Iterator[LinkPair]:
    if request.param == "fake":
        yield FakeLinkPair(count_up)
        return
    with open_wire(request.param, key_file) as wire:
        yield WireLinkPair(wire, count_up)


def test_a_link_accepts_no_message_before_the_sidecar_answers(pair: LinkPair) -> None:
    assert pair.link.state is LinkState.CONNECTING
    assert pair.link.session_count == 0
    assert pair.link.sidecar is None
    assert not pair.link.send(submit(1))
    assert pair.link.dropped == 1


def test_a_ready_link_has_the_welcome_of_its_sidecar(pair: LinkPair) -> None:
    ready(pair)
    assert pair.link.session_count == 1
    assert pair.link.refusal is None
    assert pair.link.sidecar is not None
    assert pair.link.sidecar.vocab_size == VOCAB_SIZE


def test_drafts_arrive_in_order(pair: LinkPair) -> None:
    ready(pair)
    asked = [submit(1, last=10), submit(2, last=30)]
    assert all(pair.link.send(message) for message in asked)
    drafts = [draft for draft in collect(pair, 6) if isinstance(draft, Drafted)]
    for message in asked:
        assert [draft for draft in drafts if draft.submission == message.submission] == drafts_of(
            message
        )
    assert pair.link.dropped == pair.link.malformed == 0


def test_a_receive_returns_at_most_its_limit(pair: LinkPair) -> None:
    ready(pair)
    assert pair.link.send(submit(1))
    pieces: list[list[FromSidecar]] = []

    def step() -> None:
        pair.serve()
        pieces.append(pair.link.receive(limit=1))

    until(lambda: sum(map(len, pieces)) == 3, step)
    assert max(map(len, pieces)) == 1
    assert [draft for piece in pieces for draft in piece] == drafts_of(submit(1))


def test_a_close_reaches_the_sidecar(pair: LinkPair) -> None:
    ready(pair)
    assert pair.link.send(submit(1))
    assert pair.link.send(Close(1))
    until(lambda: pair.closes, pair.step)
    assert pair.closes == [Close(1)]


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
def test_an_invalid_draft_is_dropped_and_counted(pair: LinkPair, bad: Drafted) -> None:
    ready(pair)
    good = Drafted(1, 0, 0, 0, [0, VOCAB_SIZE - 1])
    pair.inject(bad)
    pair.inject(good)
    assert collect(pair, 1) == [good]
    assert pair.link.malformed == 1
    assert pair.link.state is LinkState.READY


def test_the_link_passes_drafts_of_unknown_requests_and_old_bases_to_the_caller(
    pair: LinkPair,
) -> None:
    ready(pair)
    foreign = Drafted(77, 0, 0, 0, [1])
    stale = Drafted(1, 0, 12, 0, [1])
    pair.inject(foreign)
    pair.inject(stale)
    assert collect(pair, 2) == [foreign, stale]


def test_a_dead_sidecar_is_lost_and_its_successor_opens_a_new_session(pair: LinkPair) -> None:
    ready(pair)
    pair.die()
    until(lambda: pair.link.state is LinkState.LOST, pair.step)
    assert not pair.link.send(submit(1))
    assert not pair.link.send(Close(1))
    pair.revive()
    ready(pair)
    assert pair.link.session_count == 2
    assert pair.link.send(submit(2))
    assert collect(pair, 3) == drafts_of(submit(2))


def test_a_sidecar_that_is_replaced_at_once_opens_a_new_session(pair: LinkPair) -> None:
    ready(pair)
    pair.revive()
    until(lambda: pair.link.session_count == 2, pair.step)
    ready(pair)


def test_a_refused_link_gives_the_reason_and_sends_nothing_until_another_sidecar_comes(
    pair: LinkPair,
) -> None:
    ready(pair)
    pair.refuse()
    until(lambda: pair.link.state is LinkState.REFUSED, pair.step)
    assert pair.link.refusal is not None
    assert "tokenizer" in pair.link.refusal
    assert not pair.link.send(submit(1))
    pair.revive()
    ready(pair)
    assert pair.link.refusal is None
    assert pair.link.session_count == 2


@pytest.mark.parametrize(
    "message",
    [
        Submit(1, [cast(int, object())], 0, 8, 2, 0.5),
        Submit(1 << 70, [1], 0, 8, 2, 0.5),
        Submit(1, [VOCAB_SIZE - 1] * (9 << 20), 0, 8, 2, 0.5),
    ],
    ids=["object", "huge", "long"],
)
def test_a_message_that_cannot_be_encoded_is_never_to_be_sent_again(
    pair: LinkPair, message: Submit
) -> None:
    ready(pair)
    assert pair.link.send(message) is Delivery.NEVER
    assert pair.link.send(submit(2))
    assert collect(pair, 3) == drafts_of(submit(2))
    assert pair.link.state is LinkState.READY
    assert pair.link.session_count == 1


def test_commits_are_accepted(pair: LinkPair) -> None:
    ready(pair)
    assert pair.link.send(Commits([Commit(1, 3, [1, 2], 5), Commit(2, 0, [3], 9)]))
    assert pair.link.send(submit(1))
    assert collect(pair, 3) == drafts_of(submit(1))
    assert pair.link.malformed == 0


def test_a_closed_link_neither_sends_nor_receives(pair: LinkPair) -> None:
    ready(pair)
    pair.link.close()
    pair.link.close()
    assert pair.link.receive() == []
    assert not pair.link.send(submit(1))
    assert pair.link.state is not LinkState.READY
