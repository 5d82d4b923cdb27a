"""Ends this process when the one that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

INTERVAL_S = 0.5
GRACE_S = 10.0
"""Time to stop in an orderly way; a process that hangs is ended without."""


def end_with_parent(parent_pid: int) -> None:
    """From now on, behave as on SIGTERM once `parent_pid` is no longer our parent.

    A thread looks, also while a model is being loaded. The kernel's own signal at a parent's death
    (PR_SET_PDEATHSIG) comes when the *thread* ends that started us, which is too early.
    """
    threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
