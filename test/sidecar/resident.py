"""Checks the memory of a sidecar process on a CPU."""

from __future__ import annotations

import psutil

from sglang_qspec.sidecar.memory import cpu_bytes


def check_memory(pid: int | None, fraction: float) -> None:
    """Fail unless the process takes what is announced for `fraction`, or at most 15 % less.

    Libraries count that only its fork server has read.
    """
    announced = cpu_bytes(psutil.virtual_memory().total, fraction)
    process = psutil.Process(pid)
    memory, above = process.memory_info(), psutil.Process(process.ppid()).memory_info()
    taken = memory.rss - memory.shared + max(memory.shared, above.shared)
    assert 0.85 * announced <= taken <= announced, f"{taken / announced:.2f} of {announced}"
