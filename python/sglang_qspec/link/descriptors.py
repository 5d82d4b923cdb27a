"""Limit of the process's file descriptors, and the share of them for connections."""

from __future__ import annotations

import os
import resource

_NO_LIMIT = 1 << 20
"""Stands for RLIM_INFINITY, which is -1 in Python."""


def raise_limit() -> None:
    """Raise this process's soft limit of open files to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def spare() -> int:
    """Number of file descriptors for connections: half of the free ones.

    The process needs the other half for its own files, and for connections that ZMQ accepts between
    two checks of the limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _NO_LIMIT if soft == resource.RLIM_INFINITY else soft
    return max(1, (limit - len(os.listdir("/proc/self/fd"))) // 2)
