"""Gives each server on a machine CPU cores of its own; Ray counts cores, but names none."""

from __future__ import annotations

import os
import socket


class Cores:
    """CPU cores that no other process of this machine claims in this way.

    A claimed core is an abstract Unix socket with its number. The kernel frees it with the process.
    """

    def __init__(self, count: int) -> None:
        """Claim `count` of the cores that this process may use, or as many as are free."""
        self._sockets: dict[int, socket.socket] = {}
        for core in sorted(os.sched_getaffinity(0)):
            if len(self._sockets) == count:
                break
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0sglang-qspec/core/{core}")
            except OSError:  # another process has the core
                claim.close()
            else:
                self._sockets[core] = claim

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the claimed cores."""
        return frozenset(self._sockets)
