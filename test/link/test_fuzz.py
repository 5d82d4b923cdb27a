"""The codec under mutated frames, and both ends of real sockets with a peer that sends them."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.errors import LinkError
from sglang_qspec.link import LinkServer, LinkState
from sglang_qspec.link.frame import decode_from_sidecar, decode_to_sidecar, encode
from sglang_qspec.messages import PROTOCOL, Hello, Welcome, max_to_sidecar_bytes
from test.fuzz.allowed import check_from_sidecar, check_to_sidecar
from test.fuzz.examples import examples
from test.fuzz.frames import Frames
from test.link.sockets import dealer, waiting
from test.link.wire import FINGERPRINT, VOCAB_SIZE, Wire, bare_sidecar, ready, until

CONTEXT = 64
MOST_BYTES = max_to_sidecar_bytes(CONTEXT)
BYTES_EACH = 96
"""Maximum bytes of memory per byte of a frame during decoding; lists of small lists need most."""
MOST_CALLS = 1000
"""Maximum number of calls of Python and C functions for one frame, whatever its size."""

seeds = st.integers(0, (1 << 32) - 1)


def frames_of(seed: int) -> Frames:
    return Frames(random.Random(seed), VOCAB_SIZE, 40)


def refuse(error: LinkError) -> None:
    raise error


def read_as_sidecar(frame: bytes) -> None:
    left_out: list[LinkError] = []
    try:
        message = decode_to_sidecar(frame, VOCAB_SIZE, left_out.append, MOST_BYTES)
    except LinkError:
        return
    check_to_sidecar(message, VOCAB_SIZE)
    again: list[LinkError] = []
    assert decode_to_sidecar(encode(message, 1 << 24), VOCAB_SIZE, again.append, 1 << 24) == message
    assert not again


def read_as_server(frame: bytes) -> None:
    try:
        message = decode_from_sidecar(frame, VOCAB_SIZE)
    except LinkError:
        return
    check_from_sidecar(message, VOCAB_SIZE)


@examples(20)
@given(seeds)
def test_the_codec_passes_only_messages_that_the_protocol_allows(seed: int) -> None:
    frames = frames_of(seed)
    message = frames.from_a_server()
    sent = encode(message, 1 << 24), encode(frames.from_a_sidecar())
    assert decode_to_sidecar(sent[0], VOCAB_SIZE, refuse, 1 << 24) == message
    for frame in (*sent, *map(frames.mutate, sent)):
        read_as_sidecar(frame)
        read_as_server(frame)


@examples(10)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_link_error(frame: bytes) -> None:
    read_as_sidecar(frame)
    read_as_server(frame)


def test_every_message_of_the_generator_passes_and_most_mutated_ones_do_not() -> None:
    """Otherwise the tests above would test little."""
    refused = 0
    for seed in range(1000):
        frames = frames_of(seed)
        to_sidecar = encode(frames.from_a_server(), 1 << 24)
        decode_to_sidecar(to_sidecar, VOCAB_SIZE, refuse, MOST_BYTES)
        decode_from_sidecar(encode(frames.from_a_sidecar()), VOCAB_SIZE)
        try:
            decode_to_sidecar(frames.mutate(to_sidecar), VOCAB_SIZE, lambda _: None, MOST_BYTES)
        except LinkError:
            refused += 1
    assert 300 < refused < 950


def filled(head: bytes, item: bytes) -> bytes:
    """A frame of nearly the maximum size that holds one long list of `item`."""
    count = (MOST_BYTES - len(head) - 5) // len(item)
    return head + b"\xdd" + count.to_bytes(4, "big") + item * count


SUBMIT = b"\x82\xa4type\xa6submit\xa9token_ids"
COMMITS = b"\x82\xa4type\xa7commits\xa8requests"
COMMIT = b"\x84\xaasubmission\x01\xa8base_len\x00\xa9token_ids\x91\x01\xaemax_new_tokens\x01"
BEATS = b"\x82\xa4type\xa9heartbeat\xaastep_times"


@pytest.mark.parametrize(
    "frame",
    [
        filled(SUBMIT, b"\x01"),
        filled(SUBMIT, b"\xcf" + b"\xff" * 8),
        filled(COMMITS, b"\x01"),
        filled(COMMITS, b"\x80"),
        filled(COMMITS, COMMIT),
        filled(COMMITS, b"\x81" + b"\xa1x" * 2),
        filled(b"\x82\xa4type\xa5hello\xabfingerprint", b"\xa0"),
        filled(b"\x82\xa4type\xa5hello\xa1x", b"\x91" * 900 + b"\x00"),
        filled(b"\x82\xa4type\xa5hello\xa1x", b"\x81\x01\x02"),
    ],
    ids=lambda frame: frame[6:20].hex(),
)
def test_calls_and_memory_for_a_frame_to_a_sidecar_are_bounded(frame: bytes) -> None:
    costs(lambda: read_as_sidecar(frame), len(frame))


@pytest.mark.parametrize(
    "frame",
    [
        filled(BEATS, b"\x92\x01\x01")[: 64 << 10],
        b"\x82\xa4type\xa9heartbeat\xaastep_times\xdc\x50\x00" + b"\x92\x01\x01" * 0x5000,
        b"\x82\xa4type\xa7drafted\xa9token_ids\xdd\x00\x00\xf0\x00" + b"\x01" * 0xF000,
        b"\x82\xa4type\xa7drafted\xaacandidates\xdc\x70\x00" + b"\x80" * 0x7000,
        b"\x82\xa4type\xa7refusal\xa6reason\xdb\x00\x00\xf0\x00" + b"\xc3\xa9" * 0x7800,
    ],
    ids=lambda frame: f"{len(frame)} {frame[6:20].hex()}",
)
def test_calls_and_memory_for_a_frame_to_a_server_are_bounded(frame: bytes) -> None:
    costs(lambda: read_as_server(frame), len(frame))


def costs(read: Callable[[], None], size: int) -> None:
    """Counts calls, because the time depends on the machine and on the garbage collector."""
    read()
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        read()
    finally:
        sys.setprofile(None)
    assert calls < MOST_CALLS
    tracemalloc.start()
    try:
        read()
        assert tracemalloc.get_traced_memory()[1] < BYTES_EACH * size + (64 << 10)
    finally:
        tracemalloc.stop()


def flood_server(wire: Wire, count: int, seed: int) -> None:
    """Three bare sockets send frames to the sidecar while a real link is served."""
    server = wire.serve()
    link = wire.link()
    ready(link, server)
    frames = frames_of(seed)
    with (
        dealer(wire.endpoint, wire.keys) as a,
        dealer(wire.endpoint, wire.keys) as b,
        dealer(wire.endpoint, wire.keys) as c,
    ):
        peers = (a, b, c)
        for peer in peers:
            peer.send(encode(Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT, 1)))
        until(lambda: len(server.peers) == 4, lambda: server.receive(0))
        for number in range(count):
            peers[number % 3].send(frames.to_sidecar())
            if number % 20 == 0:
                receive_all(server)
                link.receive()
        until(lambda: server.malformed > count // 20, lambda: receive_all(server))
        for peer in peers:
            waiting(peer)
        assert len(server.peers) <= 4
        until(
            lambda: link.heartbeat is not None and link.state is LinkState.READY,
            lambda: receive_all(server),
            link.receive,
        )


def receive_all(server: LinkServer) -> None:
    for peer, message in server.receive(0):
        assert peer is not None
        check_to_sidecar(message, VOCAB_SIZE)
    server.departed()


def flood_link(wire: Wire, count: int, seed: int) -> None:
    """A bare socket sends frames to a link, then follows the protocol."""
    frames = frames_of(seed)
    with bare_sidecar(wire) as sidecar:
        link = sidecar.link
        for number in range(count):
            sidecar.send(frames.from_sidecar())
            if number % 20 == 0:
                for message in link.receive():
                    check_from_sidecar(message, VOCAB_SIZE)
                sidecar.read()
        until(lambda: link.malformed > count // 20, link.receive)
        # A refusal holds for the connection; the link greets a restarted sidecar again.
        assert link.state in LinkState
        number = link._hellos
        if link.refusal is None and number:
            welcome = Welcome(PROTOCOL, "any", VOCAB_SIZE, CONTEXT, "new", number + 1)
            assert link.session_count <= number
            link._send_hello()
            sidecar.send(welcome)
            until(lambda: link.state is LinkState.READY, link.receive)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_sidecar_keeps_serving_under_any_frames(wire: Wire, seed: int) -> None:
    flood_server(wire, 1500, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_server_keeps_reading_under_any_frames(wire: Wire, seed: int) -> None:
    flood_link(wire, 1500, seed)
