"""Ends this process by a signal, or when its parent process has ended."""

from __future__ import annotations

import os
import signal
import threading
import time

INTERVAL_S = 0.5
"""Time between two checks, in seconds."""
GRACE_S = 10.0
"""Time to stop after SIGTERM, in seconds; the process then exits without cleaning up."""


def stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def end_with_parent(parent_pid: int) -> None:
    """Start a thread that sends this process SIGTERM once `parent_pid` is no longer its parent.

    The thread also works while a model loads. The kernel's PR_SET_PDEATHSIG would come too early:
    when the parent's *thread* that started this process ends.
    """
    threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
