"""Owns the CPUs and the number of threads of the target in this process."""

from __future__ import annotations

import contextlib
import os

import torch


class TargetCores:
    """Runs this process on all CPUs of the server, or on those that the sidecar leaves.

    `shared` are the sidecar's CPUs. The sidecar belongs to Linux's idle class, so it hardly runs
    while the target uses all CPUs.
    """

    def __init__(self, shared: frozenset[int]) -> None:
        self._all = frozenset(os.sched_getaffinity(0))
        self._own = self._all - shared
        self._cpus = self._all
        self._threads = {self._all: torch.get_num_threads()}
        # By default torch has one thread for each core, also where a core is two CPUs.
        threads = self._threads[self._all]
        self._threads[self._own] = max(1, threads * len(self._own) // len(self._all))

    @property
    def ratio(self) -> float:
        """Number of all CPUs over the number without those of the sidecar."""
        return len(self._all) / len(self._own)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of CPUs without those of the sidecar, and of all CPUs."""
        return len(self._own), len(self._all)

    @property
    def has_all(self) -> bool:
        """Whether this process may run on all CPUs now."""
        return self._cpus == self._all

    def use(self, *, everything: bool) -> int:
        """Move all threads of this process to all CPUs, or to those that the sidecar leaves.

        Returns the number of CPUs.
        """
        cpus = self._all if everything else self._own
        if cpus != self._cpus:
            self._move(cpus)
        return len(cpus)

    def _move(self, cpus: frozenset[int]) -> None:
        self._cpus = cpus
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread), cpus)
        torch.set_num_threads(self._threads[cpus])
