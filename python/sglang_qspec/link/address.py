"""Checks the address of an endpoint, on the server and on the sidecar.

A unix socket is only as private as its directory, so the directory must be private (`directory`).
A tcp endpoint needs a key file.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_qspec.errors import LinkError
from sglang_qspec.link.directory import check_private, check_private_or_absent
from sglang_qspec.link.keys import Keys

IPC = "ipc://"
TCP = "tcp://"
MAX_PATH_BYTES = 107
"""Maximum length of a socket's path; `sun_path` of Linux has 108 bytes, the last one zero."""

_TCP_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(?P<port>\d{1,5}|\*)")


def check_connect(endpoint: str, keys: Keys | None) -> None:
    """Raise LinkError unless a server may connect to `endpoint`.

    The directory of an ipc endpoint may be absent, because the sidecar may start later, unless
    other users could create it.
    """
    with _naming(endpoint):
        if endpoint.startswith(IPC):
            check_private_or_absent(os.path.dirname(_ipc_path(endpoint)))
            return
        host, port = _tcp_address(endpoint, keys)
        if host == "*" or port in ("*", "0"):
            raise LinkError("a server needs a host and a port")


def check_bind(endpoint: str, keys: Keys | None) -> None:
    """Raise LinkError unless a sidecar may bind `endpoint`.

    ZMQ would delete any file at an ipc path, and take over the path of a sidecar that listens
    there. Both are refused.
    """
    with _naming(endpoint):
        if not endpoint.startswith(IPC):
            _tcp_address(endpoint, keys)
            return
        path = _ipc_path(endpoint)
        check_private(os.path.dirname(path))
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise LinkError("the file there is not a socket")
        if _someone_listens(path):
            raise LinkError("another process listens there")


@contextmanager
def _naming(endpoint: str) -> Iterator[None]:
    """Put the endpoint in front of what is wrong with it."""
    try:
        yield
    except (LinkError, OSError) as error:
        raise LinkError(f"the endpoint is {endpoint!r}, but {error}") from None


def _ipc_path(endpoint: str) -> str:
    path = endpoint.removeprefix(IPC)
    if not os.path.isabs(path) or path.endswith("/") or "\0" in path:
        raise LinkError("must be ipc:// and an absolute path")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise LinkError(
            f"its path has {length} bytes, and a unix socket's path may have at most "
            f"{MAX_PATH_BYTES}"
        )
    return path


def _tcp_address(endpoint: str, keys: Keys | None) -> tuple[str, str]:
    match = _TCP_ADDRESS.fullmatch(endpoint.removeprefix(TCP))
    if not endpoint.startswith(TCP) or match is None:
        raise LinkError("must be ipc://PATH or tcp://HOST:PORT")
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:
        raise LinkError("a port is a number from 1 to 65535")
    if keys is None:
        raise LinkError(
            "a tcp endpoint needs a key file: write one with `qspec keys PATH`, and give it to "
            "both ends"
        )
    return host, port


def _someone_listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # The listener's queue is full, or the socket belongs to another user.
            return True
    return True
