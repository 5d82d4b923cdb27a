"""The sidecar's end of the link serves the right servers, and no server blocks another."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from sglang_qspec.errors import LinkError
from sglang_qspec.link import LinkServer, LinkState, Peer, SidecarLink
from sglang_qspec.messages import (
    PROTOCOL,
    Close,
    Drafted,
    FromSidecar,
    Heartbeat,
    Hello,
    Ping,
    Refusal,
    Submit,
    ToSidecar,
    Welcome,
)
from test.link.sockets import GARBAGE, OVERSIZED, dealer, plain_socket, waiting
from test.link.wire import FINGERPRINT, VOCAB_SIZE, Wire, ready, received, until

HELLO = Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT)
SUBMIT = Submit(1, [1, 2], 0, 8, 2, 0.5)
encode = msgspec.msgpack.encode


def draft(index: int = 0) -> Drafted:
    return Drafted(1, 0, 0, index, [index % VOCAB_SIZE])


def connected(link: SidecarLink, server: LinkServer) -> Peer:
    """Connect the link; returns its peer at the server."""
    before = set(server.peers)
    ready(link, server)
    (peer,) = set(server.peers) - before
    return peer


def served(server: LinkServer, count: int) -> list[tuple[Peer, ToSidecar]]:
    messages: list[tuple[Peer, ToSidecar]] = []
    until(lambda: len(messages) >= count, lambda: messages.extend(server.receive(1)))
    return messages


def answers(peer: zmq.Socket[bytes], server: LinkServer, count: int) -> list[FromSidecar]:
    """The server's first `count` messages to a bare socket."""
    frames: list[list[bytes]] = []
    until(
        lambda: len(frames) == count,
        lambda: server.receive(1),
        lambda: frames.extend(waiting(peer)),
    )
    return [msgspec.msgpack.decode(frame, type=FromSidecar) for (frame,) in frames]


def next_draft(link: SidecarLink) -> FromSidecar:
    (drafted,) = received(link, limit=1)
    return drafted


def drafts_reach(link: SidecarLink, server: LinkServer, peer: Peer) -> bool:
    """Whether the server's drafts arrive at the link in order."""
    wanted = [draft(index) for index in range(20)]
    for drafted in wanted:
        assert server.send(peer, drafted)
    return received(link, 20) == wanted


@pytest.mark.parametrize(
    ("hello", "head", "reason"),
    [
        (Hello(PROTOCOL + 1, VOCAB_SIZE, FINGERPRINT), "", "protocol"),
        (Hello(PROTOCOL, VOCAB_SIZE, "another"), "", "tokenizer"),
        (Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT, head="a"), "", "this sidecar runs none"),
        (HELLO, "a", "this sidecar runs the head tiny draft"),
        (Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT, head="b"), "a", "runs another head"),
    ],
    ids=["protocol", "fingerprint", "no head", "head", "another head"],
)
def test_a_server_that_does_not_fit_is_refused_and_not_served(
    wire: Wire, hello: Hello, head: str, reason: str
) -> None:
    server = wire.serve(head=head)
    link = wire.link(hello.protocol, hello.vocab_size, hello.fingerprint, head=hello.head)
    until(lambda: link.state is LinkState.REFUSED, link.receive, lambda: server.receive(0))
    assert link.refusal is not None
    assert reason in link.refusal
    assert server.peers == ()
    with dealer(wire.endpoint, wire.keys) as peer:
        peer.send(encode(hello))
        peer.send(encode(SUBMIT))
        until(lambda: server.unserved == 1, lambda: server.receive(1))
        (answer,) = answers(peer, server, 1)
        assert isinstance(answer, Refusal)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 10, VOCAB_SIZE + 10])
def test_a_target_with_another_vocabulary_size_is_served_and_reads_only_its_own_ids(
    wire: Wire, vocab_size: int
) -> None:
    server = wire.serve()
    link = wire.link(vocab_size=vocab_size)
    peer = connected(link, server)
    assert peer.vocab_size == vocab_size
    assert link.sidecar is not None
    assert link.sidecar.vocab_size == VOCAB_SIZE
    last = min(vocab_size, VOCAB_SIZE) - 1
    assert link.send(Submit(1, [1, VOCAB_SIZE], 0, 8, 2, 0.5))
    assert link.send(Submit(2, [1, last], 0, 8, 2, 0.5))
    ((_, message),) = served(server, 1)
    assert isinstance(message, Submit)
    assert message.token_ids == [1, last]
    assert server.malformed == 1
    assert server.send(peer, Drafted(2, 0, 0, 0, [vocab_size]))
    assert server.send(peer, Drafted(2, 0, 0, 0, [last]))
    assert next_draft(link) == Drafted(2, 0, 0, 0, [last])
    assert link.malformed == 1


def test_a_repeated_hello_does_not_change_the_vocabulary_size_of_a_session(wire: Wire) -> None:
    server = wire.serve()
    with dealer(wire.endpoint, wire.keys) as peer:
        for vocab_size in (7, 70):
            peer.send(encode(Hello(PROTOCOL, vocab_size, FINGERPRINT)))
        answers(peer, server, 2)
    assert [peer.vocab_size for peer in server.peers] == [7]


def test_a_target_without_token_ids_is_not_served(wire: Wire) -> None:
    server = wire.serve()
    with dealer(wire.endpoint, wire.keys) as peer:
        peer.send(encode(Hello(PROTOCOL, 0, FINGERPRINT)))
        until(lambda: server.malformed, lambda: server.receive(1))
    assert server.peers == ()


def test_a_peer_without_a_hello_is_neither_served_nor_answered(wire: Wire) -> None:
    server = wire.serve()
    with dealer(wire.endpoint, wire.keys) as peer:
        for message in (SUBMIT, Close(1), Ping()):
            peer.send(encode(message))
        messages: list[tuple[Peer, ToSidecar]] = []
        until(lambda: server.unserved == 3, lambda: messages.extend(server.receive(1)))
        assert messages == []
        # The first message that it gets is the answer to its Hello.
        peer.send(encode(HELLO))
        (answer,) = answers(peer, server, 1)
        assert isinstance(answer, Welcome)


def test_a_ping_is_answered_with_the_heartbeat_of_the_callback(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    ready(link, server)
    until(lambda: link.heartbeat, link.receive, lambda: server.receive(0))
    assert link.heartbeat is not None
    assert msgspec.structs.replace(link.heartbeat, answers=0) == Heartbeat(3, 2, 1, 0)


def test_a_repeated_hello_keeps_the_session(wire: Wire) -> None:
    server = wire.serve()
    with dealer(wire.endpoint, wire.keys) as peer:
        for _ in range(3):
            peer.send(encode(HELLO))
        welcomes = [answer for answer in answers(peer, server, 3) if isinstance(answer, Welcome)]
        assert [welcome.session for welcome in welcomes] == 3 * [server.peers[0].session]
        assert server.departed() == []


def test_servers_with_equal_submissions_are_kept_apart(wire: Wire) -> None:
    server = wire.serve()
    links = [wire.link(), wire.link()]
    peers = [connected(link, server) for link in links]
    for link in links:
        assert link.send(SUBMIT)
    assert {peer for peer, _ in served(server, 2)} == set(peers)
    for index, (link, peer) in enumerate(zip(links, peers, strict=True)):
        assert server.send(peer, draft(index))
        assert next_draft(link) == draft(index)


def test_a_peer_that_never_reads_loses_its_own_drafts_only(wire: Wire) -> None:
    server = wire.serve(send_queue=10)
    link = wire.link()
    reader = connected(link, server)
    with dealer(wire.endpoint, wire.keys, receive_queue=1) as stalled_socket:
        stalled_socket.send(encode(HELLO))
        until(lambda: len(server.peers) == 2, lambda: server.receive(1))
        (stalled,) = set(server.peers) - {reader}
        big = Drafted(1, 0, 0, 0, [99] * 10_000)
        until(lambda: not server.send(stalled, big))
        assert server.dropped == 1
        assert link.send(SUBMIT)
        assert served(server, 1) == [(reader, SUBMIT)]
        until(lambda: not server.send(stalled, big))
        for index in range(100):
            assert server.send(reader, draft(index))
            assert next_draft(link) == draft(index)
        assert stalled in server.peers


def test_garbage_does_not_harm_the_sidecar_or_other_servers(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    reader = connected(link, server)
    submit = msgspec.to_builtins(SUBMIT)
    changes: list[dict[str, object]] = [
        {"token_ids": [-1]},
        {"token_ids": [VOCAB_SIZE]},
        {"token_ids": [1.5]},
        {"token_ids": ["1"]},
        {"stop_token_ids": [-7]},
        {"base_len": -1},
        {"base_len": 3},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1 << 62},
        {"completions": -1},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"submission": -1},
        {"submission": True},
        {"submission": "a"},
        {"token_ids": []},
        {"type": "drafted"},
    ]
    wrong = [submit | change for change in changes]
    with dealer(wire.endpoint, wire.keys) as peer:
        peer.send(encode(HELLO))
        for frame in GARBAGE:
            peer.send(frame)
        for content in wrong:
            peer.send(encode(content))
        peer.send_multipart([encode(SUBMIT), b"more"])
        peer.send(encode(Close(1)))
        ((sender, last),) = served(server, 1)
        assert last == Close(1)
        assert server.malformed == len(GARBAGE) + len(wrong) + 1
        peer.send(OVERSIZED)
        until(lambda: not server.send(sender, draft()), lambda: server.receive(1))
        assert server.departed() == [sender]
    assert drafts_reach(link, server, reader)
    assert link.state is LinkState.READY


def test_bytes_that_are_not_zmq_do_no_harm(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    reader = connected(link, server)
    for frame in (*GARBAGE, b"\xff" + bytes(8) + b"\x7f" + b"A" * 4096):
        with plain_socket(wire.endpoint) as plain:
            plain.sendall(frame)
    assert drafts_reach(link, server, reader)
    assert server.peers == (reader,)


def test_a_disconnected_server_departs_at_the_next_send(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    peer = connected(link, server)
    link.close()
    until(lambda: not server.send(peer, draft()))
    assert server.departed() == [peer]
    assert server.departed() == []
    assert server.peers == ()
    assert not server.send(peer, draft())


def test_a_silent_server_is_forgotten(wire: Wire) -> None:
    server = wire.serve(forget_after_s=10.0)
    silent, alive = wire.link(lost_after_s=1000.0), wire.link(lost_after_s=1000.0)
    gone, stays = connected(silent, server), connected(alive, server)

    def second() -> None:
        wire.clock.ahead_s += 1.0
        assert alive.send(Ping())
        server.receive(5)

    until(lambda: server.peers == (stays,), second)
    assert server.departed() == [gone]
    assert not server.send(gone, draft())


def test_a_pause_of_the_sidecar_does_not_make_it_forget_servers(wire: Wire) -> None:
    server = wire.serve(forget_after_s=10.0)
    link = wire.link()
    peer = connected(link, server)
    wire.clock.ahead_s += 3600.0
    server.receive(0)
    assert server.peers == (peer,)
    assert server.departed() == []


def test_a_server_that_reconnects_is_a_new_peer(wire: Wire) -> None:
    server = wire.serve()
    first = wire.link()
    before = connected(first, server)
    first.close()
    until(lambda: not server.send(before, draft()))
    after = connected(wire.link(), server)
    assert after != before
    assert not server.send(before, draft())


def test_a_receive_returns_at_most_its_limit(wire: Wire) -> None:
    server = wire.serve()
    link = wire.link()
    ready(link, server)
    for number in range(10):
        assert link.send(Close(number))
    sizes: list[int] = []
    until(lambda: sum(sizes) == 10, lambda: sizes.append(len(server.receive(1, limit=3))))
    assert max(sizes) <= 3


def test_a_port_in_use_is_a_clear_error(wire: Wire) -> None:
    wire.serve()
    with pytest.raises(LinkError, match=r"cannot be bound|another process listens"):
        wire.serve()


def test_closing_twice_is_allowed(wire: Wire) -> None:
    server = wire.serve()
    server.close()
    server.close()
    with pytest.raises(zmq.ZMQError):
        server.receive(0)
