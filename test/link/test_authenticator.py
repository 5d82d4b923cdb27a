"""The authenticator's answers to ZMQ's authentication requests, including malformed ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from sglang_qspec.link import Keys
from sglang_qspec.link.authenticator import Authenticator


@pytest.fixture
def asked(key_file: Keys) -> Iterator[tuple[Authenticator, zmq.Socket[bytes]]]:
    """An authenticator, and the socket that sends requests to it."""
    context = zmq.Context()
    authenticator = Authenticator(context, key_file)
    asker = context.socket(zmq.DEALER)
    asker.connect("inproc://zeromq.zap.01")
    try:
        yield authenticator, asker
    finally:
        authenticator.close()
        context.destroy(linger=0)


def _request(proven: bytes, **changes: bytes) -> list[bytes]:
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
    asked: tuple[Authenticator, zmq.Socket[bytes]], key_file: Keys
) -> None:
    authenticator, asker = asked
    key = z85.decode(key_file.server_public)
    asker.send_multipart(_request(key))
    assert authenticator.answer() == 0
    assert _status(asker) == b"200"
    for changes in (
        {"key": bytes(32)},
        {"key": b""},
        {"mechanism": b"NULL"},
        {"mechanism": b"PLAIN"},
        {"domain": b"other"},
        {"version": b"2.0"},
    ):
        asker.send_multipart(_request(key, **changes))
        assert authenticator.answer() == 1
        assert _status(asker) == b"400"


def test_a_request_with_wrong_fields_is_denied(
    asked: tuple[Authenticator, zmq.Socket[bytes]], key_file: Keys
) -> None:
    authenticator, asker = asked
    key = z85.decode(key_file.server_public)
    for request in (_request(key)[:-1], [*_request(key), b"more"], [b"", b"1.0", b"7"]):
        asker.send_multipart(request)
        assert authenticator.answer() == 1
        assert _status(asker) == b"400"


def test_a_message_that_is_no_request_does_not_hold_up_the_next_request(
    asked: tuple[Authenticator, zmq.Socket[bytes]], key_file: Keys
) -> None:
    authenticator, asker = asked
    key = z85.decode(key_file.server_public)
    # ZMQ drops messages without the empty frame that ends a return address, or with nothing behind.
    for message in ([b"x"], [b"x", b"1.0", b"7"], [b""], [b"", b"1.0"], [b"", b""]):
        asker.send_multipart(message)
    asker.send_multipart(_request(key))
    assert authenticator.answer() == 2
    for _ in range(2):
        empty, version, *_ = asker.recv_multipart(zmq.NOBLOCK)
        assert (empty, version) == (b"", b"1.0")
    assert _status(asker) == b"200"
