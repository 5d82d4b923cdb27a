"""The key file that authenticates both ends of a link over TCP.

Both ends use the same file; copy it over a trusted channel. It holds a CURVE key pair for the
sidecar and another for its servers. A process without the file can be neither a sidecar nor a
server of this link. An ipc endpoint uses no keys, because its directory is private.
"""

from __future__ import annotations

import os
import shlex
import stat

import msgspec
import zmq

from sglang_qspec.errors import LinkError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ALL_BUT_GROUP_READ = _OTHERS & ~stat.S_IRGRP
_KEY_CHARS = 40
"""Length of a CURVE key, 32 bytes, in Z85."""
_MAX_FILE_BYTES = 4096
"""Maximum number of bytes that `load` reads."""


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key pairs of both ends, each key in Z85 (40 ASCII characters)."""

    sidecar_public: str
    sidecar_secret: str
    server_public: str
    server_secret: str

    def __repr__(self) -> str:
        return f"Keys(sidecar_public={self.sidecar_public!r}, ...)"


def create(path: str | os.PathLike[str]) -> Keys:
    """Write a new key file with mode 0600, and return its keys.

    Raises LinkError if the file exists or cannot be written.
    """
    pairs = (zmq.curve_keypair(), zmq.curve_keypair())
    keys = Keys(*(key.decode("ascii") for pair in pairs for key in pair))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
    except OSError as error:
        raise LinkError(f"the key file {os.fspath(path)!r} cannot be written: {error}") from None
    return keys


def load(path: str | os.PathLike[str]) -> Keys:
    """Read a key file; `path` may be a symbolic link.

    Raises LinkError if the file cannot be read, is accessible to other users, or is not a valid key
    file. The group may read a file of root, as PostgreSQL allows too: root gave it this access, for
    example Kubernetes to the `fsGroup` of a pod.
    """
    name = repr(os.fspath(path))
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise LinkError(f"the key file {name} cannot be read: {error}") from None
    forbidden = _OTHERS if status.st_uid else _ALL_BUT_GROUP_READ
    if status.st_mode & forbidden:
        readers = "" if status.st_uid else ", and its group read it"
        raise LinkError(
            f"the key file {name} has the mode {stat.S_IMODE(status.st_mode):04o}, but only its "
            f"owner may have access{readers}: run `chmod 600 {shlex.quote(os.fspath(path))}`; "
            "for a secret of Kubernetes set `defaultMode: 0400`"
        )
    try:
        keys = msgspec.json.decode(text, type=Keys)
    except (msgspec.MsgspecError, UnicodeError):
        # The error is not shown: it would quote the file, which may hold another secret.
        raise LinkError(f"{name} is not a key file; `qspec keys PATH` writes one") from None
    _check(keys, name)
    return keys


def load_for(endpoint: str, path: str) -> Keys | None:
    """The keys of an endpoint: those of the file at `path` for tcp, and None for ipc.

    None too if `path` is empty. Raises LinkError as `load` does.
    """
    return load(path) if path and endpoint.startswith("tcp://") else None


def _check(keys: Keys, name: str) -> None:
    pairs = (
        ("sidecar", keys.sidecar_public, keys.sidecar_secret),
        ("server", keys.server_public, keys.server_secret),
    )
    for end, public, secret in pairs:
        try:
            fits = len(secret) == _KEY_CHARS and zmq.curve_public(secret.encode("ascii")) == (
                public.encode("ascii")
            )
        except (ValueError, zmq.ZMQError):
            fits = False
        if not fits:
            raise LinkError(f"the key file {name} is damaged: the {end}'s keys are not a pair")
