"""Finds TCP ports for servers that bind them later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST = 20_000
EPHEMERAL = 32_768
"""First port that Linux by default gives to connections, and to sockets bound without a port."""


def free_port(host: str = "127.0.0.1") -> int:
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


def _first_ephemeral() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return EPHEMERAL
    return first if first > FIRST + 1000 else EPHEMERAL
