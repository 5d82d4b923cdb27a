"""Runs sidecars as child processes, and restarts them when they fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from sglang_qspec.config import LONGEST_BACKLOG_S, QSpecConfig, environment_with_gpus
from sglang_qspec.sidecar.forks import ForkServer, started

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "sglang_qspec.sidecar")
"""Command that starts a sidecar, without its options."""
GRACE_S = 5.0
"""Time, in seconds, to exit after SIGTERM before the sidecar is killed."""
LOOK_S = 0.25
"""Interval, in seconds, between two checks that the sidecar is alive."""
BACKOFF_S = (0.25, 1.0, 5.0, 15.0, 60.0)
"""Waits before consecutive restart attempts, in seconds. The sidecar is not restarted after the
failure that follows the last wait."""
UNUSABLE = 78
"""Exit code of a sidecar if its settings or its draft model cannot work, EX_CONFIG of sysexits.h.
After this code the sidecar is not restarted."""
SETTLED_S = 120.0
"""Run time, in seconds, after which a failure no longer counts as consecutive."""
SERVED_S = 30.0
"""Time for which a sidecar was connected, in seconds, after which it does not count either."""


class Supervised:
    """Starts a sidecar process, restarts it when it fails, and ends it.

    The sidecar logs to this process's standard error. It has its own process group, so a terminal's
    Ctrl-C reaches only this process. It stays in the session of this process, because the kernel
    divides CPU time between sessions before it considers niceness.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        visible: str | None,
        forks: bool,
        fork_server: ForkServer | None = None,
        name: str = "the sidecar",
        consequence: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`visible` is the process's CUDA_VISIBLE_DEVICES; None leaves it unset.

        With `forks` a fork server starts it (`sidecar.forks`), `fork_server` or else a new one, so
        that a restart imports nothing; for sidecars on CPUs. The log calls the process `name`, and
        states the `consequence` of giving it up.
        """
        self.command = list(command)
        self._visible = visible
        self._forks = forks
        self._fork_server = fork_server
        self._name = name
        self._consequence = consequence
        self.restarts = 0
        """Number of restarts after the sidecar had died or could not be started."""
        self._process: subprocess.Popen[bytes] | ForkServer | None = None
        self._wanted = False
        """Whether the sidecar is to run: `start` was called, and `stop` was not."""
        self._clock = clock
        self._started_at = 0.0
        """Time of the latest start attempt."""
        self._connected_at: float | None = None
        """Time since which the sidecar has been connected; None if it was not, or nobody says."""
        self._failures = 0
        """Number of consecutive failures."""
        self._start_error: OSError | None = None
        """Error of the latest start attempt; None if it succeeded."""
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
        """Return code of `subprocess`; None while the sidecar runs or was never started."""
        return self._process.poll() if self._process is not None else None

    @property
    def given_up(self) -> bool:
        """Whether the sidecar has ended and will not be started again."""
        return not self.alive and (not self._wanted or self._failures > len(BACKOFF_S))

    def start(self) -> None:
        """Start the sidecar unless it is alive, without waiting for its model to load.

        If the system cannot start a process, for example for lack of memory, the failure counts as
        a death of the sidecar, and `keep_alive` tries again later.
        """
        self._wanted = True
        if not self.alive:
            self._launch()

    def _launch(self) -> None:
        self._started_at = self._clock()
        self._connected_at = None
        self._process = None
        self._start_error = None
        try:
            self._process = self._forked() if self._forks else self._new()
        except OSError as error:
            self._start_error = error
        else:
            what = "the fork server of " if self._forks else ""
            logger.info("%s%s is process %d", what, self._name, self._process.pid)

    def _new(self) -> subprocess.Popen[bytes]:
        """The sidecar as a new process. Raises OSError."""
        return started(self.command, environment_with_gpus(self._visible), subprocess.DEVNULL)

    def _forked(self) -> ForkServer:
        """A fork server that has the order to fork the sidecar. Raises OSError."""
        arguments = self.command[len(PROGRAM) :]
        if self._fork_server is None or not self._fork_server.fork(arguments):
            self._end_forks()
            self._fork_server = ForkServer.as_program(environment_with_gpus(self._visible))
            self._fork_server.fork(arguments)
        return self._fork_server

    def keep_alive(self, *, connected: bool = False) -> None:
        """Restart the sidecar if it has died or could not be started.

        The wait before a restart grows with the number of consecutive failures. Call this often,
        from one thread, and say whether the sidecar is `connected` if that is known.
        """
        now = self._clock()
        if connected and self._connected_at is None:
            self._connected_at = now
        if now < self._next_look or not self._wanted:
            return
        self._next_look = now + LOOK_S
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart_at = None
                self._launch()
                self.restarts += self._process is not None
        elif not self.alive and self._failures <= len(BACKOFF_S):
            if self._has_settled(now):
                self._failures = 0
            self._failures += 1
            if self.exit_code == UNUSABLE:
                self._wanted = False
                self._end_forks()
                logger.error(
                    "%s cannot run with these settings and this draft model, as its last message "
                    "says, and will not be started again%s",
                    self._name,
                    self._consequence,
                )
                return
            if self._failures > len(BACKOFF_S):
                self._end_forks()
                logger.error(
                    "%s %s %d times in a row and will not be started again",
                    self._name,
                    self._failure,
                    self._failures,
                )
                return
            wait_s = BACKOFF_S[self._failures - 1]
            self._restart_at = now + wait_s
            logger.warning("%s %s; restarting it in %g s", self._name, self._failure, wait_s)

    def _has_settled(self, now: float) -> bool:
        """Whether the sidecar that has ended had run for so long that the failure is a new one."""
        served = self._connected_at is not None and now - self._connected_at >= SERVED_S
        return served or now - self._started_at >= SETTLED_S

    def _end_forks(self) -> None:
        """End the fork server of a sidecar that has ended, without waiting."""
        if self._fork_server is not None:
            self._fork_server.close(grace_s=0.0)

    @property
    def _failure(self) -> str:
        """How the latest run or start attempt ended, for the log."""
        if self._start_error is not None:
            return f"could not be started ({self._start_error})"
        return f"exited with code {self.exit_code}"

    def dismiss(self, grace_s: float = GRACE_S) -> None:
        """Stop the sidecar for good in a new thread, without waiting."""
        self._wanted = False
        threading.Thread(target=self.stop, args=(grace_s,), name="sidecar-end", daemon=True).start()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the sidecar and wait for its end; kill it after `grace_s` seconds."""
        self._wanted = False
        if self._process is None:
            self._end_forks()
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "%s did not exit within %g s of SIGTERM: killing it", self._name, grace_s
            )
            self._process.kill()
            self._process.wait()
        self._end_forks()


class SidecarProcess(Supervised):
    """The sidecar of one server.

    It ends by itself when this process is gone.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        *,
        model_path: str,
        quantization: str | None,
        endpoint: str,
        device: str,
        mem_fraction: float | None = None,
        visible: str | None = None,
        revision: str | None = None,
        attention_backend: str | None = None,
        trust_remote_code: bool = False,
        cores: str = "",
        background: bool = False,
        shared: bool = False,
        target_path: str = "",
        fork_server: ForkServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`device` is `cpu`, `cuda` or `cuda:N`, numbered among the GPUs that `visible` names.

        `visible` is the sidecar's CUDA_VISIBLE_DEVICES; None leaves it unset. `mem_fraction` is the
        sidecar's fraction of the device's memory; 0 stands for the default, and None for the
        fraction in `settings`. `revision` is the branch, tag or commit of a model on a hub; None is
        the hub's default. `attention_backend` names a backend of SGLang; None lets the sidecar
        choose. `cores` are the CPUs that the sidecar is pinned to; empty for all. In the
        `background` it runs while nothing else wants its CPUs. A `shared` sidecar serves several
        schedulers of one server, whose equal prompts share their drafts. `target_path` is the
        target of a head; empty for a draft model. A sidecar on a CPU is forked by `fork_server`, or
        by a new one.
        """
        command = [
            *PROGRAM,
            f"--model-path={model_path}",
            f"--endpoint={endpoint}",
            f"--device={device}",
            f"--dtype={settings.dtype}",
            f"--cores={cores}",
            f"--mem-fraction={settings.mem_fraction if mem_fraction is None else mem_fraction}",
            f"--slots={settings.draft_slots}",
            f"--max-completion-tokens={settings.max_completion_tokens}",
            f"--parent-pid={os.getpid()}",
        ]
        if quantization is not None:
            command.append(f"--quantization={quantization}")
        if revision is not None:
            command.append(f"--revision={revision}")
        if attention_backend is not None:
            command.append(f"--attention-backend={attention_backend}")
        if target_path:
            command.append(f"--target-path={target_path}")
        if settings.head_path:
            command.append(f"--head-path={settings.head_path}")
        if settings.draft_model_head:
            command.append(f"--draft-model-head={settings.draft_model_head}")
        if background:
            command.append("--background")
        if shared:
            command.append("--share-between-servers")
            # The schedulers of one server are no tenants that take work from each other.
            command.append(f"--max-backlog={LONGEST_BACKLOG_S}")
        if trust_remote_code:
            command.append("--trust-remote-code")
        super().__init__(
            command,
            visible=visible,
            forks=device == "cpu",
            fork_server=fork_server,
            consequence="; the server runs without its drafts",
            clock=clock,
        )
        self.shared = shared
