"""Checks that only this user can enter the directory of a unix socket.

The umask decides the mode of ZMQ's sockets, so a user who can enter the directory may be able to
connect. A user who can write to a parent directory could replace the directory.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat

from sglang_qspec.errors import LinkError

_MAX_LINKS = 40
"""Maximum number of symbolic links in the path of a directory; the same as in Linux."""
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def check_private(directory: str) -> None:
    """Raise LinkError unless `directory` is private, and OSError if it cannot be reached.

    It must belong to this user and have a mode without access for group and others. No other user
    may be able to replace it, or a symbolic link in its path.
    """
    status = os.lstat(_resolve(directory))
    if not stat.S_ISDIR(status.st_mode):
        raise LinkError(f"{directory!r} is not a directory")
    user = os.geteuid()
    if status.st_uid != user:
        raise LinkError(
            f"{directory!r} belongs to user {status.st_uid}, but must belong to user {user}, who "
            "runs this process"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LinkError(
            f"{directory!r} has the mode {mode:04o}, and only its owner may have access: run "
            f"`chmod 0700 {shlex.quote(directory)}`"
        )


def check_private_or_absent(directory: str) -> None:
    """Like `check_private`, but `directory` may be absent if no other user can create it."""
    try:
        check_private(directory)
    except FileNotFoundError as error:
        present = os.path.dirname(error.filename)
        if os.stat(present).st_mode & _WRITABLE:
            raise LinkError(
                f"{directory!r} is absent, and other users can write to {present!r}: run "
                f"`mkdir -m 0700 {shlex.quote(directory)}`"
            ) from None


def check_parent(parent: str) -> None:
    """Raise LinkError if another user could replace a new directory of this user in `parent`.

    Raises OSError if `parent` cannot be reached.
    """
    _check_above(_resolve(os.path.abspath(parent)))


def _resolve(directory: str) -> str:
    """Return the path of `directory` without symbolic links.

    Raises LinkError if another user can replace a component of the path. Raises OSError if a
    component is missing (with its path) or cannot be followed.
    """
    steps = directory.split("/")[::-1]
    path = "/"
    links = 0
    while steps:
        step = steps.pop()
        if step in ("", "."):
            continue
        if step == "..":
            path = os.path.dirname(path)
            continue
        above, path = path, os.path.join(path, step)
        status = os.lstat(path)
        _check_above(above)
        if stat.S_ISLNK(status.st_mode):
            if status.st_uid not in (0, os.geteuid()):
                raise LinkError(
                    f"{path!r} is a symbolic link of user {status.st_uid}, who can change its "
                    "target"
                )
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), directory)
            target = os.readlink(path)
            path = "/" if target.startswith("/") else above
            steps += target.split("/")[::-1]
    return path


def _check_above(directory: str) -> None:
    mode = os.stat(directory).st_mode
    if mode & _WRITABLE and not mode & stat.S_ISVTX:
        name = shlex.quote(directory)
        raise LinkError(
            f"other users can write to {directory!r} and replace its contents: run "
            f"`chmod go-w {name}`, or `chmod +t {name}` if all users must be able to write to it"
        )
