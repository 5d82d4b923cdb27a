"""Checks of the CPUs of a CPU server: threads, hardware threads, NUMA nodes and pinning."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.config import AUTO_CORES, QSpecConfig, flag
from sglang_qspec.engine.placement import environment
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, failure, ok, warning

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU time of this container: microseconds in a period, and the period; or `max`."""


def cores(case: Case) -> Finding:
    """Whether the target's threads fit the CPUs of this process."""
    from sglang_qspec.engine.placement import core_division

    cpus = os.sched_getaffinity(0)
    physical = core_division.cores_of(cpus)
    nodes = {core_division.node_of(cpu) for cpu in cpus}
    found = _count(len(cpus), "CPU")
    if len(physical) < len(cpus):
        found += f" on {_count(len(physical), 'core')}"
    found += f", in {_count(len(nodes), 'NUMA node')}"
    variables = environment.thread_variables()
    found += "".join(f", {name}={text}" for name, text in variables.items())
    threads, bound = (variables.get(name) for name in ("OMP_NUM_THREADS", BIND))
    if threads is not None and not (threads.isdecimal() and int(threads) > 0):
        return warning(f"{found}, which is no number of threads", "Unset OMP_NUM_THREADS.")
    if threads is not None and int(threads) > len(cpus):
        return warning(
            f"{found}: more threads than CPUs, so threads wait for each other",
            f"Set OMP_NUM_THREADS={len(cpus)}, or unset it.",
        )
    objection = _objection(bound, cpus)
    if objection:
        return warning(f"{found}, which {objection}", f"Correct or unset {BIND}.")
    quota = _quota()
    if quota < len(cpus) and (threads is None or int(threads) > quota):
        fits = max(1, math.floor(quota))
        return warning(
            f"{found}, but this container gets the time of {quota:g} CPUs only",
            f"Set OMP_NUM_THREADS={fits}, or pin the server with taskset to {fits} CPUs.",
        )
    if len(nodes) > 1:
        return warning(
            f"{found}: threads of one node wait for the memory of another",
            "Start the server on the CPUs of one node, with taskset or numactl.",
        )
    return ok(found)


BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def _objection(bound: str | None, cpus: set[int]) -> str | None:
    """What is wrong with the CPUs to which SGLang binds the target's threads; None if nothing."""
    if bound is None or bound == "all":
        return None
    try:
        named = values.parse_cores(bound.partition("|")[0])
    except ValueError as allowed:
        return f"must be {allowed}"
    missing = sorted(named - cpus)
    return f"names CPU {missing[0]}, on which this process may not run" if missing else None


def _quota() -> float:
    """Number of CPUs of which this container gets the time; infinite without a limit."""
    try:
        time, period = QUOTA.read_text().split()
        return int(time) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def sidecar_cores(case: Case) -> Finding:
    """Whether the sidecar has CPUs of its own."""
    from sglang_qspec.engine.placement import core_division

    assert case.settings is not None
    given, name = case.settings.cores, flag("cores")
    if core_division.pinned_cpus(case.settings):
        return _pinned(case.settings)
    own = core_division.sidecar_cpus(replace(case.settings, cores=AUTO_CORES))
    shares = "the sidecar gets only the time that the target leaves idle"
    if own and given == AUTO_CORES:
        return ok(f"the sidecar gets the CPUs {own} while that pays")
    if own:
        return warning(
            f"{shares}: {name} is {given}", f"Give {name} auto, with which it gets the CPUs {own}."
        )
    variables = environment.thread_variables()
    if variables:
        return warning(
            f"{shares}: the CPUs are not divided, because {' and '.join(variables)} is set",
            f"Unset it, or give {name} the CPUs of the sidecar.",
        )
    return warning(
        f"{shares}: there is only one core", "Give the server another core, or no draft model."
    )


def _pinned(settings: QSpecConfig) -> Finding:
    """Whether the sidecar can run on the CPUs that the user chose, apart from the target."""
    from sglang_qspec.engine.placement import core_division

    given, name = settings.cores, flag("cores")
    asked = values.parse_cores(given)
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, asked)
        got = os.sched_getaffinity(0)
    except OSError as error:
        return failure(
            f"{name} is {given}, but the sidecar cannot run there ({error.strerror})",
            f"Give {name} CPUs of this machine, or auto.",
        )
    finally:
        os.sched_setaffinity(0, own)
    if got != asked:
        missing = ",".join(map(str, sorted(asked - got)))
        return warning(
            f"{name} is {given}, but the sidecar cannot run on CPU {missing}",
            f"Give {name} CPUs of this machine.",
        )
    if got & own:
        shared = ",".join(map(str, sorted(got & own)))
        if not core_division.left_cpus(settings):
            return warning(
                f"target and sidecar both run on CPU {shared}",
                f"Start the server with taskset on other CPUs than {name}, or give {name} auto.",
            )
        own -= got
    if any(core & own and core & got for core in core_division.cores_of(own | got)):
        return warning(
            f"target and sidecar share cores: {name} is {given}, and hardware threads of the same "
            "cores belong to the target",
            "Give each of them whole cores (lscpu --extended).",
        )
    return ok(f"the sidecar is pinned to the CPUs {given}, apart from the target")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
