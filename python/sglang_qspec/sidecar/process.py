"""The sidecar as a child of a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

from sglang_qspec.config import QSpecConfig

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time to stop in an orderly way before it is killed."""
LOOK_S = 0.25
"""Between two looks at whether it is alive."""
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Before each restart in a row. There is no other: what fails so often will fail again."""
SETTLED_S = 120.0
"""One that ran for so long does not count as a failure in a row."""


class SidecarProcess:
    """Starts `python -m sglang_qspec.sidecar` and ends it.

    It writes its log to this process's standard error, ends by itself when this process is gone,
    and is in a session of its own, so that a terminal's Ctrl-C reaches only the server.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        *,
        model_path: str,
        quantization: str | None,
        endpoint: str,
        device: str,
        trust_remote_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device`: `cpu`, `cuda` or `cuda:N`, counted among those that this process may see."""
        self.command = [
            sys.executable,
            "-m",
            "sglang_qspec.sidecar",
            f"--model-path={model_path}",
            f"--endpoint={endpoint}",
            f"--device={device}",
            f"--dtype={settings.dtype}",
            f"--cores={settings.cores}",
            f"--mem-fraction={settings.mem_fraction}",
            f"--slots={settings.draft_slots}",
            f"--max-completion-tokens={settings.max_completion_tokens}",
            f"--parent-pid={os.getpid()}",
        ]
        if quantization is not None:
            self.command.append(f"--quantization={quantization}")
        if settings.key_file:
            self.command.append(f"--key-file={settings.key_file}")
        if trust_remote_code:
            self.command.append("--trust-remote-code")
        self.restarts = 0
        """How often it was started again after it had died."""
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        """It was started, and not stopped."""
        self._clock = clock
        self._started_at = 0.0
        self._failures = 0
        """In a row."""
        self._next_look = 0.0
        self._restart_at: float | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """How it ended, as `subprocess` tells it; None while it has not."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start it, unless it is alive. Its model takes seconds to load; this does not wait."""
        self._wanted = True
        if self.alive:
            return
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # a server's standard output may be someone's data
            # Ctrl-C in a terminal is for the server alone. A session of its own would do that
            # too, but the kernel shares processors out by session first, and by niceness within.
            process_group=0,
        )
        self._started_at = self._clock()
        logger.info("started the sidecar as process %d", self._process.pid)

    def keep_alive(self) -> None:
        """Start it again if it has died, after a while that grows with each time in a row.

        To be called often, by the thread that started it: it ends with its parent's thread.
        """
        now = self._clock()
        if now < self._next_look or not self._wanted:
            return
        self._next_look = now + LOOK_S
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart_at = None
                self.restarts += 1
                self.start()
        elif not self.alive and self._failures <= len(BACKOFF_S):
            if now - self._started_at >= SETTLED_S:
                self._failures = 0
            self._failures += 1
            if self._failures > len(BACKOFF_S):
                logger.error("the sidecar died with %s again: giving it up", self.exit_code)
                return
            wait_s = BACKOFF_S[self._failures - 1]
            self._restart_at = now + wait_s
            logger.warning(
                "the sidecar died with %s; it is started again in %g s", self.exit_code, wait_s
            )

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End it, by force after `grace_s` seconds; returns when it is gone. May be repeated."""
        self._wanted = False
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("the sidecar did not end within %g s: killing it", grace_s)
            self._process.kill()
            self._process.wait()
