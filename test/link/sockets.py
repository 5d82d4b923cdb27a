"""Peers that violate the protocol: bare ZMQ sockets, and sockets without ZMQ."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from sglang_qspec.link import Keys
from sglang_qspec.messages import max_to_sidecar_bytes

OVERSIZED = b"x" * (max_to_sidecar_bytes(1 << 20) + 1)
GARBAGE = [
    b"",
    b"\x00",
    b"\xc1" * 40,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",  # a pickle
    b"\x82\xa4type\xa7refusal\xa6reason\xa2\xff\xfe",  # no UTF-8
    b"\x83\xa4type\xa7refusal\xa1x" + b"\x91" * 50_000 + b"\x01\xa6reason\xa1a",  # deeply nested
    b"\x82\xa4type\xa7drafted\xa9token_ids\xdd\xff\xff\xff\xff",  # announces a list of 4 G items
    b"\x81\xa4type\xa5hello",
    b"\x81\xa4type\x05",
]


@contextmanager
def dealer(
    endpoint: str | None, keys: Keys | None, receive_queue: int = 1000
) -> Iterator[zmq.Socket[bytes]]:
    """A server's ZMQ socket that sends only what the test sends; None leaves it unconnected."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.rcvhwm = receive_queue
    if keys is not None:
        peer.curve_serverkey = keys.sidecar_public.encode()
        peer.curve_publickey = keys.server_public.encode()
        peer.curve_secretkey = keys.server_secret.encode()
    if endpoint is not None:
        peer.connect(endpoint)
    try:
        yield peer
    finally:
        context.destroy(linger=0)


@contextmanager
def router(endpoint: str, keys: Keys | None) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A sidecar's ZMQ socket that sends only what the test sends, and its address."""
    context = zmq.Context()
    peer = context.socket(zmq.ROUTER)
    if keys is not None:
        peer.curve_server = True
        peer.curve_publickey = keys.sidecar_public.encode()
        peer.curve_secretkey = keys.sidecar_secret.encode()
    peer.bind(endpoint)
    try:
        yield peer, peer.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        context.destroy(linger=0)


def waiting(peer: zmq.Socket[bytes]) -> list[list[bytes]]:
    """The messages that have arrived at a bare socket."""
    received = []
    while peer.poll(0):
        received.append(peer.recv_multipart(zmq.NOBLOCK))
    return received


def plain_socket(endpoint: str, blocking: bool = True) -> socket.socket:
    """A connection to the endpoint without ZMQ; raises BlockingIOError only without `blocking`."""
    if endpoint.startswith("ipc://"):
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.setblocking(blocking)
        try:
            plain.connect(endpoint.removeprefix("ipc://"))
        except BlockingIOError:
            plain.close()
            raise
        return plain
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def closed(plain: socket.socket) -> bool:
    """Whether the other end has closed a plain socket. Discards received bytes."""
    plain.setblocking(False)
    try:
        while plain.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
