"""Warns of a sidecar that does not connect, for example because other work has its CPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil

from sglang_qspec.link import LinkState
from sglang_qspec.sidecar.child_process import SidecarProcess

WARN_AFTER_S = 30.0
"""Seconds without a connected sidecar after which the server warns."""

logger = logging.getLogger(__name__)


class Absence:
    """Measures for how long a server that wants drafts has had no connected sidecar."""

    def __init__(self, process: SidecarProcess | None, clock: Callable[[], float]) -> None:
        """`process` is the server's own sidecar; None if others run its sidecars."""
        self._process = process
        self._clock = clock
        self._state: LinkState | None = None
        self._since = clock()
        self._has_warned = False

    def look(self, state: LinkState | None) -> None:
        """Note the best state of any sidecar, None without one, and log one warning an absence."""
        if state in (None, LinkState.READY):
            self._since = self._clock()
            self._has_warned = False
        self._state = state
        if not self._has_warned and (warning := self.warning) is not None:
            self._has_warned = True
            logger.warning("%s", warning)

    @property
    def warning(self) -> str | None:
        """What is wrong, after WARN_AFTER_S without a connected sidecar; None before."""
        waited_s = self._clock() - self._since
        if self._state in (None, LinkState.READY) or waited_s < WARN_AFTER_S:
            return None
        text = f"no sidecar has been connected for {waited_s:.0f} s ({self._state.value})"
        used_s = self._cpu_seconds()
        if used_s is not None:
            text += f"; it has had {used_s:.1f} s of CPU time"
            if used_s < waited_s / 2:
                text += ", so other work has its CPUs"
        return f"{text}. Requests are served without its drafts."

    def _cpu_seconds(self) -> float | None:
        """CPU time of the server's own sidecar; None if there is none, or if it does not run."""
        if self._process is None or self._process.pid is None:
            return None
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)
