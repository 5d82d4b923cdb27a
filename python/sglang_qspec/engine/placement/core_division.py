"""Divides the CPUs of a server between its target and its own sidecar.

Without cores of its own, a sidecar beside a busy target gets hardly any time. The sidecar gets
whole cores, with all their hardware threads, at the end of the last NUMA node. It belongs to
Linux's idle class, so the target can also use these cores for a while
(`engine.placement.target_cores`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.config import AUTO_CORES, SHARED_CORES, QSpecConfig, flag
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.placement.environment import Placement

logger = logging.getLogger(__name__)

SHARE = 4
"""The sidecar gets one core in SHARE, and at least one."""
_TOPOLOGY = Path("/sys/devices/system/cpu")


def divide(placed: Placement, settings: QSpecConfig, ranks: int) -> Placement:
    """Divide the CPUs between a target of this number of ranks and its sidecar."""
    if pinned_cpus(settings):
        left = left_cpus(settings) if ranks == 1 else ""
        shares = shares_cpus(settings, ranks)
        if left:
            logger.info("The target leaves the CPUs %s to its sidecar.", left)
        elif shares:
            logger.warning(
                "The target also runs on CPUs of its sidecar (%s is %s), and each slows the other "
                "down: the target keeps its CPUs if OMP_NUM_THREADS or SGLANG_CPU_OMP_THREADS_BIND "
                "is set, if it has several ranks, or if it has no others.",
                flag("cores"),
                settings.cores,
            )
        return replace(placed, left=left, shares_cpus=shares)
    if settings.cores == AUTO_CORES and ranks > 1:
        pinned, shares = beside_ranks(ranks)
        return replace(placed, pinned=pinned, shares_cpus=shares)
    cores, shares = sidecar_cpus(settings), shares_cpus(settings)
    if settings.cores == AUTO_CORES and not cores:
        logger.info(
            "Target and sidecar share the CPUs: to divide them takes two cores or more, and "
            "neither OMP_NUM_THREADS nor SGLANG_CPU_OMP_THREADS_BIND."
        )
    return replace(placed, cores=cores, shares_cpus=shares)


def sidecar_cpus(settings: QSpecConfig) -> str:
    """The sidecar's CPUs as a list such as `2,3`; empty if the CPUs are not divided.

    The setting `auto`, the default, divides the CPUs. It does not if the user has placed the
    target's threads, or if this process may run on one core only.
    """
    if settings.cores != AUTO_CORES or environment.places_threads():
        return ""
    cores = cores_of(os.sched_getaffinity(0))
    if len(cores) < 2:
        return ""
    return _text(cpu for core in cores[-share_of(cores) :] for cpu in core)


def share_of(cores: Sequence[frozenset[int]]) -> int:
    """The number of cores for the sidecar."""
    return max(1, len(cores) // SHARE)


def beside_ranks(ranks: int) -> tuple[str, bool]:
    """The CPUs of the sidecar of a target of several ranks, and whether a rank has them too.

    Each rank always keeps its CPUs, and polls for requests on them even without any. So the sidecar
    gets the cores on which no rank runs. If there are none, it shares the last core at equal
    priority.
    """
    taken = _of_ranks(ranks)
    cores = cores_of(os.sched_getaffinity(0))
    free = [core for core in cores if not core & taken]
    return _text(cpu for core in free or cores[-1:] for cpu in core), not free


def _of_ranks(ranks: int) -> frozenset[int]:
    """The CPUs on which the ranks of a target run."""
    # `qspec doctor` loads this module to check a machine without SGLang.
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    groups = environment.rank_cpus().split("|")
    if groups == ["all"]:  # SGLang gives each rank a NUMA node
        groups = get_cpu_ids_by_node()[:ranks]
    return frozenset(cpu for group in groups for cpu in values.parse_cores(group))


def _text(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def shares_cpus(settings: QSpecConfig, ranks: int = 1) -> bool:
    """Whether a sidecar on the CPU uses CPUs of the target, and each slows the other down."""
    if ranks == 1 and (sidecar_cpus(settings) or left_cpus(settings)):
        return False
    pinned = values.parse_cores(pinned_cpus(settings))
    own = os.sched_getaffinity(0) if ranks == 1 else _of_ranks(ranks)
    return not pinned or bool(pinned & own)


def left_cpus(settings: QSpecConfig) -> str:
    """The CPUs that a target of one rank leaves to a sidecar that the user has pinned to them.

    It leaves none if the user has placed the target's threads too, or if it has no others.
    """
    own = frozenset(os.sched_getaffinity(0))
    pinned = values.parse_cores(pinned_cpus(settings)) & own
    return "" if environment.places_threads() or pinned == own else _text(pinned)


def pinned_cpus(settings: QSpecConfig) -> str:
    """The CPUs that the user has pinned the sidecar to; empty for none."""
    return "" if settings.cores in (AUTO_CORES, SHARED_CORES) else settings.cores


def cores_of(cpus: set[int]) -> list[frozenset[int]]:
    """Group `cpus` into cores of one or more hardware threads, in the order of the NUMA nodes."""
    cores = {_siblings(cpu) & cpus or frozenset((cpu,)) for cpu in cpus}
    return sorted(cores, key=lambda core: (node_of(min(core)), min(core)))


def _siblings(cpu: int) -> frozenset[int]:
    """The hardware threads of the core of a CPU; empty if the kernel does not tell."""
    try:
        text = (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        return values.parse_cores(text)
    except (OSError, ValueError):
        return frozenset()


def node_of(cpu: int) -> int:
    """The NUMA node of a CPU; 0 if the kernel does not tell."""
    for path in (_TOPOLOGY / f"cpu{cpu}").glob("node[0-9]*"):
        return int(path.name.removeprefix("node"))
    return 0
