"""Tells a sidecar to stop."""

from __future__ import annotations

import signal
import threading


def stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping
