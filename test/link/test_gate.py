"""The gate's answers to ZMQ's authentication requests, including malformed ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from sglang_qspec.link import Keys
from sglang_qspec.link.gate import Gate


@pytest.fixture
def asked(key_file: Keys) -> Iterator[tuple[Gate, zmq.Socket[bytes]]]:
    """A gate, and the socket that sends requests to it."""
    context = zmq.Context()
    gate = Gate(context, key_file)
    asker = context.socket(zmq.DEALER)
    asker.connect("inproc://zeromq.zap.01")
    try:
        yield gate, asker
    finally:
        gate.close()
        context.destroy(linger=0)


def _question(proven: bytes, **changes: bytes) -> list[bytes]:
    fields = {
        "version": b"1.0",
        "request": b"7",
        "domain": b"qspec",
        "address": b"127.0.0.1",
        "routing": b"",
        "mechanism": b"CURVE",
        "key": proven,
    }
    return [b"", *(fields | changes).values()]


def _status(asker: zmq.Socket[bytes]) -> bytes:
    empty, version, request, status, *_ = asker.recv_multipart(zmq.NOBLOCK)
    assert (empty, version, request) == (b"", b"1.0", b"7")
    return status


def test_only_the_key_of_the_key_file_is_admitted(
    asked: tuple[Gate, zmq.Socket[bytes]], key_file: Keys
) -> None:
    gate, asker = asked
    key = z85.decode(key_file.server_public)
    asker.send_multipart(_question(key))
    assert gate.answer() == 0
    assert _status(asker) == b"200"
    for changes in (
        {"key": bytes(32)},
        {"key": b""},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN"},
        {"domain": b"other"},
        {"version": b"2.0"},
    ):
        asker.send_multipart(_question(key, **changes))
        assert gate.answer() == 1
        assert _status(asker) == b"400"


def test_a_question_with_wrong_fields_is_denied(
    asked: tuple[Gate, zmq.Socket[bytes]], key_file: Keys
) -> None:
    gate, asker = asked
    key = z85.decode(key_file.server_public)
    for question in (_question(key)[:-1], [*_question(key), b"more"], [b"", b"1.0", b"7"]):
        asker.send_multipart(question)
        assert gate.answer() == 1
        assert _status(asker) == b"400"


def test_a_message_that_is_no_question_is_counted_and_not_answered(
    asked: tuple[Gate, zmq.Socket[bytes]], key_file: Keys
) -> None:
    gate, asker = asked
    key = z85.decode(key_file.server_public)
    malformed = [[b"x"], [b"x", b"1.0", b"7"], [b""], [b"", b"1.0"], [b"", b""]]
    for message in malformed:
        asker.send_multipart(message)
    asker.send_multipart(_question(key))
    assert gate.answer() == len(malformed)
    assert _status(asker) == b"200"
