"""Checks the memory of a sidecar process on a CPU."""

from __future__ import annotations

import psutil

from sglang_qspec.sidecar.memory import cpu_bytes

STACK = 16 << 20
"""Mappings up to this size may be stacks of threads, whose unused part stays unused."""


def check_memory(pid: int | None, fraction: float) -> None:
    """Fail unless the process may take what is announced for `fraction`, or at most 15 % less.

    KV that was never written counts as if it were: it only lacks its pages. Libraries count that
    only the fork server has read.
    """
    announced = cpu_bytes(psutil.virtual_memory().total, fraction)
    process = psutil.Process(pid)
    memory, above = process.memory_info(), psutil.Process(process.ppid()).memory_info()
    unused = sum(
        each.size - each.rss
        for each in process.memory_maps(grouped=False)
        if each.path == "[anon]" and each.perms == "rw-p" and each.size > STACK
    )
    taken = memory.rss - memory.shared + max(memory.shared, above.shared)
    assert unused > 0.2 * announced, "the KV is not mapped lazily"
    assert 0.85 * announced <= taken + unused <= announced, f"{taken}, {unused} of {announced}"
