"""Where the two ends of a link meet: private ipc sockets, and what is allowed of given addresses.

A unix socket is as private as its directory, so the directory has to belong to this user and be
closed to others. TCP is only for those who hold the key file.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
from types import TracebackType

from sglang_qspec.errors import LinkError
from sglang_qspec.link.keys import Keys

IPC = "ipc://"
TCP = "tcp://"
MAX_PATH_BYTES = 107
"""Linux's `sun_path` holds 108 bytes, the last of them zero."""

_PRIVATE_PREFIX = "qspec-"
_SOCKET_NAME = "link"
_TCP_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(?P<port>\d{1,5}|\*)")


class PrivateEndpoint:
    """An ipc address in a fresh directory that only this user can enter.

    `close` removes the directory; so does leaving the context.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Make the directory inside `directory`, by default the one for temporary files.

        Raises LinkError when that cannot be done, or the path of a socket there is too long.
        """
        # A long TMPDIR is common (a test's, a batch system's), and /tmp serves as well.
        parents = [directory] if directory is not None else [tempfile.gettempdir(), "/tmp"]
        fitting = [parent for parent in parents if _fits(parent)]
        if not fitting:
            raise LinkError(
                f"the path of a socket in {parents[0]!r} would be too long, but may have at most "
                f"{MAX_PATH_BYTES} bytes"
            )
        try:
            self.directory = tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=fitting[0])
        except OSError as error:
            raise LinkError(f"no private directory in {fitting[0]!r}: {error}") from None

    @property
    def address(self) -> str:
        """What both ends are given: `ipc://` and a path."""
        return IPC + os.path.join(self.directory, _SOCKET_NAME)

    def close(self) -> None:
        """Remove the directory. May be called twice."""
        remove_private(self.address)

    def __enter__(self) -> PrivateEndpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def private_endpoint() -> PrivateEndpoint:
    """A fresh private ipc address, for a server that starts its own sidecar."""
    return PrivateEndpoint()


def remove_private(endpoint: str) -> None:
    """Remove the directory of `endpoint` if a PrivateEndpoint made it; else do nothing.

    A server is often killed and cannot clean up; its sidecar, which outlives it by a moment, can.
    """
    directory, name = os.path.split(endpoint.removeprefix(IPC))
    if (
        endpoint.startswith(IPC)
        and name == _SOCKET_NAME
        and os.path.basename(directory).startswith(_PRIVATE_PREFIX)
        and set(_entries(directory)) <= {_SOCKET_NAME}
    ):
        shutil.rmtree(directory, ignore_errors=True)


def check_connect(endpoint: str, keys: Keys | None) -> None:
    """Whether a server may connect to `endpoint`. Raises LinkError that says what is allowed.

    An ipc directory that does not exist yet is fine: the sidecar may not have started.
    """
    if endpoint.startswith(IPC):
        path = _ipc_path(endpoint)
        if os.path.exists(os.path.dirname(path)):
            _check_directory(endpoint, path)
    else:
        host, port = _tcp_address(endpoint, keys)
        if host == "*" or port in ("*", "0"):
            raise LinkError(f"the endpoint is {endpoint!r}, but a server needs a host and a port")


def check_bind(endpoint: str, keys: Keys | None) -> None:
    """Whether a sidecar may bind `endpoint`. Raises LinkError that says what is allowed.

    ZMQ would remove whatever file lies at an ipc path, and take the path away from a sidecar that
    is listening there: neither is allowed.
    """
    if not endpoint.startswith(IPC):
        _tcp_address(endpoint, keys)
        return
    path = _ipc_path(endpoint)
    _check_directory(endpoint, path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise LinkError(f"the endpoint is {endpoint!r}, but a file that is no socket is there")
    if _someone_listens(path):
        raise LinkError(f"the endpoint is {endpoint!r}, but another process listens there")


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _fits(parent: str) -> bool:
    # mkdtemp adds eight random characters to the prefix.
    longest = os.path.join(os.path.abspath(parent), _PRIVATE_PREFIX + 8 * "x", _SOCKET_NAME)
    return len(os.fsencode(longest)) <= MAX_PATH_BYTES


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


def _check_directory(endpoint: str, path: str) -> None:
    directory = os.path.dirname(path)
    try:
        status = os.stat(directory)
    except OSError as error:
        raise LinkError(f"the endpoint is {endpoint!r}, but {error}") from None
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & others:
        raise LinkError(
            f"the endpoint is {endpoint!r}, but must lie in a directory that belongs to this user "
            f"and that no other can write to (mode 0700), and {directory!r} is not one"
        )


def _tcp_address(endpoint: str, keys: Keys | None) -> tuple[str, str]:
    match = _TCP_ADDRESS.fullmatch(endpoint.removeprefix(TCP))
    if not endpoint.startswith(TCP) or match is None:
        raise LinkError(f"the endpoint is {endpoint!r}, but must be ipc://PATH or tcp://HOST:PORT")
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:
        raise LinkError(f"the endpoint is {endpoint!r}, but a port is a number from 1 to 65535")
    if keys is None:
        raise LinkError(
            f"the endpoint is {endpoint!r}, and a tcp endpoint needs a key file: the link is "
            "authenticated (`qspec keys PATH` writes one)"
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
            # Full, or not ours: someone is there in any case.
            return True
    return True
