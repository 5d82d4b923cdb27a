"""Private ipc endpoints: a directory for each server that starts its own sidecar.

The directory holds the socket `link` and the lock file `owner`. The server holds the lock until it
ends, and the kernel frees the lock of a killed server. So a directory with a free lock is
abandoned. A process id would not show whether the server lives: the kernel reuses ids, and another
container that shares the directory has other ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from types import TracebackType

from sglang_qspec.errors import LinkError
from sglang_qspec.link.address import IPC, MAX_PATH_BYTES
from sglang_qspec.link.directory import check_parent

_PREFIX = "qspec-"
_NAME = re.compile(_PREFIX + "[a-z0-9_]{8}")
"""Names that `tempfile.mkdtemp` generates with the prefix."""
_SOCKET = "link"
_OWNER = "owner"
_UNLOCKED_OWNER = "owner.new"

logger = logging.getLogger(__name__)


class PrivateEndpoint:
    """An ipc address in a new directory that only this user can enter.

    `close` and the end of the context remove the directory.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Create the directory inside `directory`, by default in the one for temporary files.

        Raises LinkError if the directory cannot be created, if the path of its socket would be too
        long, or if another user could replace the directory.
        """
        parent = _first_allowed([directory] if directory is not None else _parents())
        self._owner: int | None = None
        """File descriptor of the lock file, which holds the lock; None after `close`."""
        try:
            self.directory, self._owner = _create(parent)
        except OSError as error:
            raise LinkError(f"cannot create a private directory in {parent!r}: {error}") from None

    @property
    def address(self) -> str:
        """Address of the endpoint for both ends: `ipc://` and a path."""
        return IPC + os.path.join(self.directory, _SOCKET)

    def close(self) -> None:
        """Remove the directory. May be called twice."""
        remove_private(self.address)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def __enter__(self) -> PrivateEndpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def remove_private(endpoint: str) -> None:
    """Remove the directory of `endpoint` if a PrivateEndpoint created it; otherwise do nothing.

    The sidecar calls this when its server is gone, because a killed server cannot clean up.
    """
    directory, name = os.path.split(endpoint.removeprefix(IPC))
    if endpoint.startswith(IPC) and name == _SOCKET:
        _remove(directory)


def sweep_abandoned() -> None:
    """Remove the directories of this user's servers that were killed.

    Several processes may call this at the same time, and others may create directories meanwhile.
    """
    for directory in abandoned():
        _remove(directory)
        logger.info("removed %s, the directory of a killed server", directory)


def abandoned() -> Iterator[str]:
    """The directories of this user's servers that were killed."""
    for parent in dict.fromkeys(map(os.path.realpath, _parents())):
        for name in _entries(parent):
            directory = os.path.join(parent, name)
            if _is_ours(directory) and _is_abandoned(directory):
                yield directory


def _parents() -> list[str]:
    # TMPDIR is often too long for a socket path, for example under a batch system.
    return [tempfile.gettempdir(), "/tmp"]


def _first_allowed(parents: list[str]) -> str:
    """Return the first directory in which a private endpoint can be.

    If there is none, raises LinkError with the reason for the first directory.
    """
    refusals = []
    for parent in parents:
        # mkdtemp adds eight random characters to the prefix.
        directory = os.path.join(os.path.abspath(parent), _PREFIX + 8 * "x")
        path = os.path.join(directory, _SOCKET)
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            refusals.append(
                f"the path of a socket in {parent!r} is too long: it may have at most "
                f"{MAX_PATH_BYTES} bytes"
            )
            continue
        try:
            check_parent(parent)
        except OSError as error:
            refusals.append(f"cannot create a private directory in {parent!r}: {error}")
        except LinkError as error:
            refusals.append(str(error))
        else:
            return parent
    raise LinkError(refusals[0])


def _create(parent: str) -> tuple[str, int]:
    """Create a directory in `parent`; return its path and the descriptor that holds its lock."""
    directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    try:
        return directory, _lock_new(directory)
    except BaseException:
        # Without a lock file of the final name no sweep would remove the directory.
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _lock_new(directory: str) -> int:
    """Create the lock file and return the descriptor that holds the lock.

    The file gets its name only when it is locked, so no sweep sees it unlocked.
    """
    unlocked = os.path.join(directory, _UNLOCKED_OWNER)
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(unlocked, os.path.join(directory, _OWNER))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_ours(directory: str) -> bool:
    """Whether name, owner, mode and entries show a directory of this user's PrivateEndpoint."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return (
        _NAME.fullmatch(os.path.basename(directory)) is not None
        and stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and stat.S_IMODE(status.st_mode) == 0o700
        and {_OWNER} <= set(_entries(directory)) <= {_OWNER, _SOCKET}
    )


def _is_abandoned(directory: str) -> bool:
    """Whether the lock is free. Nothing locks a directory again once its lock is free."""
    path = os.path.join(directory, _OWNER)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(directory: str) -> None:
    """Remove the directory of a PrivateEndpoint, but no files other than its own."""
    if not _is_ours(directory):
        return
    with contextlib.suppress(OSError):
        # The lock file last, so that a later sweep finds the directory if this one is interrupted.
        for name in (_SOCKET, _OWNER):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
