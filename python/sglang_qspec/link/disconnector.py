"""Closes single connections of a ZMQ socket; ZMQ has no call for this."""

from __future__ import annotations

import os
import socket


class Disconnector:
    """Shuts connections down by their file descriptors, which ZMQ owns.

    ZMQ then sees the end of the connection and closes the descriptor. ZMQ may already have closed
    the descriptor, and its number may belong to another file. `end` therefore duplicates the
    descriptor and checks the duplicate, which cannot change. One descriptor is reserved for the
    duplicate, because none may be free.
    """

    def __init__(self) -> None:
        self._blank = os.open(os.devnull, os.O_RDONLY)
        self._slot = os.dup(self._blank)
        """Holds the duplicate while a connection is shut down, and `_blank` otherwise."""

    def end(self, descriptor: int, endpoint: str) -> bool:
        """Shut a connection down; False if `descriptor` is no connection accepted at `endpoint`.

        `endpoint` is a ZMQ address with its port or path.
        """
        try:
            os.dup2(descriptor, self._slot, inheritable=False)
        except OSError:
            return False
        try:
            return _shut_down(self._slot, endpoint)
        finally:
            os.dup2(self._blank, self._slot, inheritable=False)

    def close(self) -> None:
        os.close(self._slot)
        os.close(self._blank)


def _shut_down(descriptor: int, endpoint: str) -> bool:
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # another kind of file
        return False
    try:
        accepted = _accepted_at(endpoint, connection)
        if accepted:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer has ended it
        return False
    finally:
        connection.detach()
    return accepted


def _accepted_at(endpoint: str, connection: socket.socket) -> bool:
    """Whether the connection's local address is the listener's, as for accepted connections."""
    address = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return endpoint == f"ipc://{address}"
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and endpoint.startswith("tcp://") and endpoint.endswith(f":{address[1]}")
