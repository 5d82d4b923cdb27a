"""The process's file descriptors: how many it may have open, and how many connections may take."""

from __future__ import annotations

import os
import resource

_NO_LIMIT = 1 << 20
"""Stands for RLIM_INFINITY, which is -1 in Python."""


def raise_limit() -> None:
    """Raise this process's limit of open files as far as it may without privileges."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def spare() -> int:
    """Number of file descriptors that connections may take: half of the free ones.

    The other half is for the process's own files, and for connections that are accepted before
    their number is looked at.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _NO_LIMIT if soft == resource.RLIM_INFINITY else soft
    return max(1, (limit - len(os.listdir("/proc/self/fd"))) // 2)
