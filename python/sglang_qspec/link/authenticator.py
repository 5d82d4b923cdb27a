"""Admits only servers that have the key file, with ZMQ authentication (ZAP, RFC 27) over CURVE."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from sglang_qspec.link.keys import Keys

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_DOMAIN = b"qspec"
_MECHANISM = b"CURVE"


class Authenticator:
    """Answers ZMQ's authentication requests: it admits a connection with the servers' key.

    It has no thread: the owner calls `answer` when `socket` is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._keys = keys
        self._admitted = z85.decode(keys.server_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def protect(self, router: zmq.Socket[bytes]) -> None:
        """Let `router` use CURVE and authenticate here. Call it before `router` is bound."""
        router.curve_server = True
        router.curve_secretkey = self._keys.sidecar_secret.encode("ascii")
        router.curve_publickey = self._keys.sidecar_public.encode("ascii")
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without an answer from here ZMQ refuses the connection.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> int:
        """Answer all waiting requests; return the number of refused connections."""
        refused = 0
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return refused
            admitted = self._admits(request)
            refused += not admitted
            status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
            self.socket.send_multipart(
                [_VERSION, *request[1:2], status, text, b"", b""], zmq.NOBLOCK
            )

    def close(self) -> None:
        self.socket.close(linger=0)

    def _admits(self, request: list[bytes]) -> bool:
        if len(request) != 7:
            return False
        version, _, domain, _, _, mechanism, key = request
        expected = (_VERSION, _DOMAIN, _MECHANISM, self._admitted)
        return (version, domain, mechanism, key) == expected
