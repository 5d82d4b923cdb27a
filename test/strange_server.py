"""A server that answers with any bytes, for tests of clients; it sends a bounded number of them."""

from __future__ import annotations

import gzip
import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

DEEP = b"[" * 5000 + b"]" * 5000
PIECE = 1 << 20
MOST = 80
"""Number of pieces after which an endless answer ends."""
_ZEROS = gzip.compress(bytes(32 << 20), 1)
Answer = bytes | Iterable[bytes]


@dataclass
class Strange:
    """The server; `answer` gives the bytes of the response to a path and a body."""

    answer: Callable[[str, bytes], Answer]
    url: str = ""
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request."""
    sent: list[int] = field(default_factory=list)
    """Number of bytes that the client took of each answer, or a little more."""


@contextmanager
def strange(answer: Callable[[str, bytes], Answer]) -> Iterator[Strange]:
    """A running server. It closes the connection after each answer."""
    made = Strange(answer)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self.rfile.readline()
            if not head:
                return  # the client has sent nothing
            path = head.split(b" ")[1].decode()
            length = 0
            while (line := self.rfile.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = self.rfile.read(length)
            made.asked.append((path, body))
            given = made.answer(path, body)
            sent = 0
            with suppress(OSError):  # the client has left
                for piece in (given,) if isinstance(given, bytes) else given:
                    self.wfile.write(piece)
                    sent += len(piece)
            made.sent.append(sent)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield made
        server.shutdown()


def response(body: bytes | Any, *headers: str, status: str = "200 OK") -> bytes:
    """A whole response; a body that is not bytes becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    if not any(each.startswith("Content-Length") for each in headers):
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def endless(begin: bytes = b'{"a": "', piece: bytes = b"x" * PIECE) -> Iterator[bytes]:
    """A response without an end, as far as a client can tell."""
    yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + begin
    for _ in range(MOST):
        yield piece


def bomb() -> bytes:
    """A small response that its encoding makes 64 times as long as an answer may be."""
    return response(_ZEROS * 64, "Content-Encoding: gzip")


def redirect(url: str, status: str = "307 Temporary Redirect") -> bytes:
    """A response that sends the client elsewhere."""
    return response(b"", f"Location: {url}", status=status)


def strange_responses(elsewhere: str) -> dict[str, Callable[[], Answer]]:
    """Responses that no client can use; `elsewhere` is the address of another server."""
    return {
        "deep": lambda: response(DEEP),
        "deep in an object": lambda: response(b'{"choices": ' + DEEP + b"}"),
        "deep error": lambda: response(b'{"error": ' + DEEP + b"}", status="400 Bad Request"),
        "endless": endless,
        "endless number": lambda: endless(b"1", b"1" * PIECE),
        "endless error": lambda: (
            each.replace(b"200 OK", b"500 Sorry") if n == 0 else each
            for n, each in enumerate(endless())
        ),
        "endless head": lambda: (b"HTTP/1.1 200 OK\r\n", *[b"A: " + b"x" * 1000 + b"\r\n"] * 4000),
        "bomb": bomb,
        "redirect": lambda: redirect(elsewhere),
        "moved": lambda: redirect(elsewhere, "301 Moved Permanently"),
        "length of 5000 digits": lambda: response(b"{}", "Content-Length: " + "9" * 5000),
        "cut": lambda: response(b'{"choices": [', "Content-Length: 100"),
        "no text": lambda: response(b'{"choices": "\xff\xfe"}'),
        "half pair": lambda: response(b'{"choices": [{"text": "\\ud800"}]}'),
        "no number": lambda: response(b'{"choices": [{"text": NaN}]}'),
        "infinite": lambda: response(b'{"choices": [{"text": 1e999}]}'),
        "long number": lambda: response(b'{"choices": [{"text": ' + b"1" * 5000 + b"}]}"),
        "list": lambda: response(b"[]"),
        "nothing": lambda: response(b""),
        "no response": lambda: b"",
        "no status": lambda: b"220 mail.example ESMTP\r\n\r\n",
        "bad chunks": lambda: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    }
