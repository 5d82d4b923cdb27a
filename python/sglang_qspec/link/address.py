"""Checks the address of an endpoint, on the server and on the sidecar.

A unix socket is only as private as its directory, so the directory must be private (`directory`).
A tcp endpoint needs a key file.
"""

from __future__ import annotations

import os
import re
import socket
import stat

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
    if endpoint.startswith(IPC):
        check_private_or_absent(endpoint, os.path.dirname(_ipc_path(endpoint)))
    else:
        host, port = _tcp_address(endpoint, keys)
        if host == "*" or port in ("*", "0"):
            raise LinkError(f"the endpoint is {endpoint!r}, but a server needs a host and a port")


def check_bind(endpoint: str, keys: Keys | None) -> None:
    """Raise LinkError unless a sidecar may bind `endpoint`.

    ZMQ would delete any file at an ipc path, and take over the path of a sidecar that listens
    there. Both are refused.
    """
    if not endpoint.startswith(IPC):
        _tcp_address(endpoint, keys)
        return
    path = _ipc_path(endpoint)
    check_private(endpoint, os.path.dirname(path))
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise LinkError(f"the endpoint is {endpoint!r}, but the file there is not a socket")
    if _someone_listens(path):
        raise LinkError(f"the endpoint is {endpoint!r}, but another process listens there")


def _ipc_path(endpoint: str) -> str:
    path = endpoint.removeprefix(IPC)
    if not os.path.isabs(path) or path.endswith("/") or "\0" in path:
        raise LinkError(f"the endpoint is {endpoint!r}, but must be ipc:// and an absolute path")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise LinkError(
            f"the endpoint is {endpoint!r}, a path of {length} bytes, but a unix socket's path "
            f"may have at most {MAX_PATH_BYTES}"
        )
    return path


def _tcp_address(endpoint: str, keys: Keys | None) -> tuple[str, str]:
    match = _TCP_ADDRESS.fullmatch(endpoint.removeprefix(TCP))
    if not endpoint.startswith(TCP) or match is None:
        raise LinkError(f"the endpoint is {endpoint!r}, but must be ipc://PATH or tcp://HOST:PORT")
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:
        raise LinkError(f"the endpoint is {endpoint!r}, but a port is a number from 1 to 65535")
    if keys is None:
        raise LinkError(
            f"the endpoint is {endpoint!r}, but a tcp endpoint needs a key file: write one "
            "with `qspec keys PATH`, and give it to both ends"
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
