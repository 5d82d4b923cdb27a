"""Admits only servers that have the key file, with ZMQ authentication (ZAP, RFC 27) over CURVE."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from sglang_qspec.link.keys import Keys

DOMAIN = "qspec"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Gate:
    """Answers ZMQ's authentication requests: it admits a connection with the servers' key.

    It has no thread: the owner calls `answer` when `socket` is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._admitted = z85.decode(keys.server_public)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def guard(self, router: zmq.Socket[bytes], keys: Keys) -> None:
        """Let `router` use CURVE and authenticate here. Call it before `router` is bound."""
        router.curve_server = True
        router.curve_secretkey = keys.sidecar_secret.encode("ascii")
        router.curve_publickey = keys.sidecar_public.encode("ascii")
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode("ascii"))
        # Without an answer from this gate ZMQ refuses the connection.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> int:
        """Answer all waiting requests; return the number of refused connections."""
        turned_away = 0
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return turned_away
            envelope, fields = _split(question)
            if len(fields) < 2:
                # Without a return address or request id there is no answer. ZMQ never sends this.
                turned_away += 1
                continue
            version, request_id, *details = fields
            admitted = (
                version == _VERSION
                and len(details) == 5
                and details[0] == DOMAIN.encode("ascii")
                and details[3] == b"CURVE"
                and details[4] == self._admitted
            )
            turned_away += not admitted
            status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
            self.socket.send_multipart(
                [*envelope, _VERSION, request_id, status, text, b"", b""], zmq.NOBLOCK
            )

    def close(self) -> None:
        self.socket.close(linger=0)


def _split(question: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split frames after the empty frame that ends the return address.

    Without an empty frame, all frames are the return address.
    """
    end = question.index(b"") + 1 if b"" in question else len(question)
    return question[:end], question[end:]
