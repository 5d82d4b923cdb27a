"""The server's end of the link: silent, absent and misbehaving sidecars."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from functools import partial

import msgspec
import pytest
import zmq

from sglang_qspec.link import Keys, LinkState
from sglang_qspec.link.dealer import Dealer
from sglang_qspec.link.link import POLL_BUDGET_S
from sglang_qspec.messages import (
    MAX_DRAFTED_TOKENS,
    PROTOCOL,
    Close,
    Drafted,
    Heartbeat,
    Hello,
    Refusal,
    Submit,
    ToSidecar,
    Welcome,
)
from test.link.sockets import GARBAGE, OVERSIZED
from test.link.wire import (
    FINGERPRINT,
    VOCAB_SIZE,
    Wire,
    bare_sidecar,
    open_wire,
    ready,
    received,
    until,
)

SUBMIT = Submit(1, [1, 2], 0, 8, 2, 0.5)
DRAFT = Drafted(1, 0, 0, 0, [3])
LARGEST = Drafted(1, 0, 0, 0, [3] * MAX_DRAFTED_TOKENS)
WELCOME = Welcome(PROTOCOL, "m", VOCAB_SIZE, 8, "s", 1)
"""Answers the first Hello of a link."""
encode = msgspec.msgpack.encode


def test_a_link_waits_for_a_sidecar_that_comes_later(wire: Wire) -> None:
    wire.serve().close()
    link = wire.link()
    for _ in range(100):
        assert link.receive() == []
    assert link.state is LinkState.CONNECTING
    ready(link, wire.serve())
    assert link.session_count == 1


def test_messages_sent_to_a_dead_sidecar_do_not_reach_its_successor(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    ready(link, server)
    server.close()
    for _ in range(100):
        link.send(SUBMIT)
    server = wire.serve()
    until(lambda: link.session_count == 2, link.receive, lambda: server.receive(0))
    assert server.unserved == 0


SIDECAR = f"""
import sys
from sglang_qspec.link import LinkServer
from sglang_qspec.messages import Heartbeat, Welcome
server = LinkServer(
    sys.argv[1],
    Welcome({PROTOCOL}, "m", {VOCAB_SIZE}, 8),
    {FINGERPRINT!r},
    lambda: Heartbeat(0, 0, 0, 0),
)
while True:
    server.receive(1000)
"""


def test_a_sidecar_that_is_killed_can_be_started_again_at_the_same_socket(key_file: Keys) -> None:
    with open_wire("ipc", key_file) as wire:
        link = wire.link()
        for life in (1, 2):
            with subprocess.Popen([sys.executable, "-c", SIDECAR, wire.endpoint]) as sidecar:
                try:
                    until(lambda: link.state is LinkState.READY, link.receive)
                    assert link.session_count == life
                finally:
                    sidecar.kill()
            until(lambda: link.state is LinkState.LOST, link.receive)


def test_a_silent_sidecar_is_lost_and_keeps_its_session_when_it_answers_again(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link(lost_after_s=3.0)
    ready(link, server)

    def silent_second() -> None:
        wire.clock.ahead_s += 1.0
        link.receive()

    until(lambda: link.state is LinkState.LOST, silent_second)
    assert not link.send(SUBMIT)
    assert link.send(Close(1))
    received: list[tuple[object, ToSidecar]] = []
    until(
        lambda: link.state is LinkState.READY and received,
        lambda: received.extend(server.receive(0)),
        link.receive,
    )
    assert [message for _, message in received] == [Close(1)]
    assert link.session_count == 1
    assert server.departed() == []


def test_a_pause_of_the_scheduler_does_not_make_the_sidecar_lost(wire: Wire) -> None:
    server = wire.serve(forget_after_s=1e9)
    link = wire.link(lost_after_s=3.0)
    ready(link, server)

    def answered(before: Heartbeat | None) -> bool:
        return link.heartbeat is not before

    for _ in range(5):
        heartbeat = link.heartbeat
        wire.clock.ahead_s += 60.0
        link.receive()
        assert link.state is LinkState.READY
        # The link pings at its first poll after the pause, and the sidecar answers.
        until(partial(answered, heartbeat), link.receive, lambda: server.receive(0))
    assert link.session_count == 1


def test_the_silence_of_a_starved_sidecar_does_not_count(wire: Wire) -> None:
    server = wire.serve(forget_after_s=1e9)
    link = wire.link(lost_after_s=3.0)
    ready(link, server)

    def silent_second() -> None:
        wire.clock.ahead_s += 1.0
        link.receive()

    link.starved = True
    for _ in range(1000):
        silent_second()
    assert link.send(SUBMIT), "the link is ready"
    link.starved = False
    until(lambda: link.state is LinkState.LOST, silent_second)


def test_a_link_that_the_sidecar_forgot_gets_a_new_session(wire: Wire) -> None:
    server = wire.serve(forget_after_s=5.0)
    link = wire.link(lost_after_s=3.0)
    ready(link, server)
    (before,) = server.peers

    def second_without_the_scheduler() -> None:
        wire.clock.ahead_s += 1.0
        server.receive(0)

    until(lambda: server.departed() == [before], second_without_the_scheduler)

    def poll() -> None:
        link.receive()
        server.receive(0)
        # The link pings at once and does not become LOST first.
        assert link.state is LinkState.READY

    until(lambda: link.session_count == 2, poll)
    assert server.peers != (before,)


def test_hello_is_repeated_until_it_is_answered(wire: Wire) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        until(lambda: len(sidecar.frames) >= 3, link.receive, sidecar.read)
        assert link.state is LinkState.CONNECTING
        assert sidecar.frames == [
            encode(Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT, number + 1))
            for number in range(len(sidecar.frames))
        ]
        sidecar.send(WELCOME)
        until(lambda: link.state is LinkState.READY, link.receive)


def test_messages_before_the_welcome_are_ignored(wire: Wire) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        sidecar.send(DRAFT, WELCOME, DRAFT)
        assert received(link) == [DRAFT]
        assert link.state is LinkState.READY


def test_only_an_answer_to_a_hello_opens_a_session(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """Each new session makes the server submit all its requests again."""
    with bare_sidecar(wire) as sidecar, caplog.at_level(logging.INFO):
        link = sidecar.link
        for number in range(400):
            welcome = Welcome(PROTOCOL, "m", VOCAB_SIZE, 8, f"session {number}", number % 50)
            sidecar.send(welcome)
        sidecar.send(DRAFT)
        received(link)
        sidecar.read()
        assert link.session_count <= len(sidecar.frames)
        sidecar.send(*(Refusal(f"reason {number}") for number in range(400)))
        until(lambda: link.refusal == "reason 399", link.receive)
    assert len(caplog.records) <= 4


def test_the_time_of_a_poll_is_bounded_whatever_the_sidecar_sent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        sidecar.send(WELCOME)
        until(lambda: link.state is LinkState.READY, link.receive)
        # A message always waits, and each reading of the clock uses up the time limit of a poll.
        monkeypatch.setattr(Dealer, "readable", True)
        monkeypatch.setattr(Dealer, "receive", lambda _: encode(LARGEST))
        wire.clock.step_s = POLL_BUDGET_S
        for _ in range(3):
            assert link.receive(64) == [LARGEST]


def test_a_welcome_in_another_protocol_is_a_refusal(wire: Wire) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        sidecar.send(Welcome(99, "m", VOCAB_SIZE, 8, "s", 1))
        until(lambda: link.state is LinkState.REFUSED, link.receive)
        assert link.refusal is not None
        assert "protocol 99" in link.refusal


def test_no_garbage_from_a_sidecar_reaches_the_caller(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        with caplog.at_level(logging.WARNING):
            sidecar.send(WELCOME, *GARBAGE, DRAFT)
            assert received(link) == [DRAFT]
        assert link.malformed == len(GARBAGE)
        assert link.state is LinkState.READY
        # The link logs once a minute, not once per message.
        assert sum("malformed" in record.message for record in caplog.records) == 1
        sidecar.send(OVERSIZED)
        until(lambda: link.state is LinkState.LOST, link.receive)
        assert link.malformed == len(GARBAGE)


def test_a_refusal_cannot_write_lines_into_the_log(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        sidecar.send(Refusal("no\nERROR forged\x1b[31m"))
        until(lambda: link.state is LinkState.REFUSED, link.receive)
    assert "no\\nERROR forged\\x1b" in caplog.text
    assert "\nERROR forged" not in caplog.text


def test_a_connection_that_zmq_gave_up_is_opened_again(wire: Wire) -> None:
    """ZMQ does not reconnect after a peer that broke its framing."""
    with bare_sidecar(wire, reopen_after_s=0.3) as sidecar:
        link = sidecar.link

        def welcome() -> None:
            sidecar.read()
            message = msgspec.msgpack.decode(sidecar.frames[-1], type=ToSidecar)
            if isinstance(message, Hello):
                sidecar.send(
                    Welcome(PROTOCOL, "m", VOCAB_SIZE, 8, sidecar.peer.hex(), message.number)
                )

        for _ in range(3):
            until(lambda: link.state is LinkState.READY, link.receive, welcome)
            sidecar.send(OVERSIZED)
            until(lambda: link.state is LinkState.LOST, link.receive)
        assert link.session_count >= 3


def test_the_bytes_sent_to_a_sidecar_that_does_not_read_are_bounded(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link(window_bytes=1 << 20)
    ready(link, server)
    long = Submit(1, [99] * 10_000, 0, 8, 2, 0.5)
    size = len(encode(long))
    sent = 0
    while link.send(long):
        sent += 1
        assert sent * size <= 1 << 20
    assert sent > 90
    assert link.dropped == 1
    while link.send(SUBMIT):
        pass
    assert link.send(Close(1))
    # The window opens once the sidecar reads again.
    until(lambda: link.send(long), link.receive, lambda: server.receive(0))


def test_a_new_connection_starts_with_an_empty_window(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link(window_bytes=1 << 20)
    ready(link, server)
    long = Submit(1, [99] * 100_000, 0, 8, 2, 0.5)
    while link.send(long):
        pass
    server.close()
    server = wire.serve()
    until(lambda: link.session_count == 2, link.receive, lambda: server.receive(0))
    assert link.send(long)


def test_a_close_does_not_wait_for_zmqs_thread_for_long(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ's thread may wait for a name server that does not answer."""
    answered = threading.Event()
    term = zmq.Context.term

    def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
        answered.wait()
        term(context)

    wire.serve().close()
    link = wire.link()
    monkeypatch.setattr(zmq.Context, "term", end)
    link.close()
    assert link.state is LinkState.CONNECTING
    answered.set()
