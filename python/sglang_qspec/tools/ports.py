"""Finds TCP ports for servers that bind them later, and says whether these servers hold them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import psutil

FIRST = 20_000
HOST = "127.0.0.1"
EPHEMERAL = 32_768
"""First port that Linux by default gives to connections, and to sockets bound without a port."""


def free_port(host: str = HOST) -> int:
    """A free TCP port of `host`, below those that the kernel gives away.

    A server needs seconds until it binds its port. Meanwhile the kernel could give a port of the
    ephemeral range to a connection of any process. Raises OSError if no port is found.
    """
    for _ in range(100):
        port = random.randrange(FIRST, _first_ephemeral())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"no free TCP port of {host} between {FIRST} and {_first_ephemeral()}")


class OwnPort:
    """A port of HOST that a child process is told to bind.

    Until the child binds the port, and after the child has ended, any local process can listen on
    it. While the child listens, the kernel lets no other process do so, except processes of the
    same user if the child sets SO_REUSEPORT.
    """

    def __init__(self, port: int, pid: int) -> None:
        """`pid` is the id of the child, which its parent has not waited for yet."""
        self._port = port
        self._pid = pid
        self._held: dict[str, str] = {}
        """The descriptors of the listening sockets, and the sockets that they referred to."""

    def is_held(self) -> bool:
        """Whether the child and the processes below it are the only ones that listen on the port.

        If this is true before and after a connection is made, the connection leads to the child: a
        socket that still exists has listened all the time.
        """
        if not self._held or any(_target(link) != socket for link, socket in self._held.items()):
            self._held = self._find()
        return bool(self._held)

    def _find(self) -> dict[str, str]:
        """The listening sockets; none if one of them belongs to another process."""
        try:
            child = psutil.Process(self._pid)
            own = {self._pid, *(each.pid for each in child.children(recursive=True))}
        except psutil.Error:
            return {}
        places = ((HOST, self._port), ("0.0.0.0", self._port))
        found: dict[str, str] = {}
        for each in psutil.net_connections("tcp4"):
            if each.status != psutil.CONN_LISTEN or tuple(each.laddr) not in places:
                continue
            link = f"/proc/{each.pid}/fd/{each.fd}"
            target = _target(link)
            if each.pid not in own or target is None:
                return {}
            found[link] = target
        return found


def _target(link: str) -> str | None:
    """What a descriptor of a process refers to; None if the descriptor is closed."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def _first_ephemeral() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return EPHEMERAL
    return first if first > FIRST + 1000 else EPHEMERAL
