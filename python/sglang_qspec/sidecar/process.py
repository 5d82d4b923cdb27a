"""The sidecar as a child of a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from sglang_qspec.config import QSpecConfig

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time to stop in an orderly way before it is killed."""
LOOK_S = 0.25
"""Between two looks at whether it is alive."""
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Waits before the attempts that follow failures in a row, in seconds. After the failure that
follows the last wait, no further attempt is made."""
SETTLED_S = 120.0
"""A sidecar that ran for this time, in seconds, resets the count of failures in a row."""


class SidecarProcess:
    """Starts `python -m sglang_qspec.sidecar`, restarts it when it fails, and ends it.

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
        revision: str | None = None,
        trust_remote_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device` is `cpu`, `cuda` or `cuda:N`, counted among the GPUs this process may see.

        `revision` of a model on a hub is a branch, a tag or a commit; None is the hub's default.
        """
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
        if revision is not None:
            self.command.append(f"--revision={revision}")
        if settings.key_file:
            self.command.append(f"--key-file={settings.key_file}")
        if trust_remote_code:
            self.command.append("--trust-remote-code")
        self.restarts = 0
        """How often it was started again after it had died or could not be started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        """It was started, and not stopped."""
        self._clock = clock
        self._started_at = 0.0
        """Time of the latest attempt to start it."""
        self._failures = 0
        """In a row."""
        self._start_error: OSError | None = None
        """Why the latest attempt to start it failed."""
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
        """Start it, unless it is alive. Its model takes seconds to load; this does not wait.

        If the system cannot start a process, as when it is short of memory, the error is logged
        and `keep_alive` tries again later, as it does when the sidecar has died.
        """
        self._wanted = True
        if not self.alive:
            self._launch()

    def _launch(self) -> None:
        self._started_at = self._clock()
        self._process = None
        self._start_error = None
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # a server's standard output may be someone's data
                # Ctrl-C in a terminal is for the server alone. A session of its own would do that
                # too, but the kernel shares processors out by session first, then by niceness.
                process_group=0,
            )
        except OSError as error:
            self._start_error = error
        else:
            logger.info("started the sidecar as process %d", self._process.pid)

    def keep_alive(self) -> None:
        """Start it again if it has died or could not be started.

        The wait before an attempt grows with the number of failures in a row. To be called often,
        by one thread.
        """
        now = self._clock()
        if now < self._next_look or not self._wanted:
            return
        self._next_look = now + LOOK_S
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart_at = None
                self._launch()
                self.restarts += self._process is not None
        elif not self.alive and self._failures <= len(BACKOFF_S):
            if now - self._started_at >= SETTLED_S:
                self._failures = 0
            self._failures += 1
            if self._failures > len(BACKOFF_S):
                logger.error(
                    "the sidecar %s %d times in a row; it is not started again",
                    self._failure,
                    self._failures,
                )
                return
            wait_s = BACKOFF_S[self._failures - 1]
            self._restart_at = now + wait_s
            logger.warning("the sidecar %s; it is started again in %g s", self._failure, wait_s)

    @property
    def _failure(self) -> str:
        """How the latest attempt ended, for the log."""
        if self._start_error is not None:
            return f"could not be started ({self._start_error})"
        return f"died with {self.exit_code}"

    def dismiss(self, grace_s: float = GRACE_S) -> None:
        """End it for good without waiting, as `stop` does in a thread of its own."""
        self._wanted = False
        threading.Thread(target=self.stop, args=(grace_s,), name="sidecar-end", daemon=True).start()

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
