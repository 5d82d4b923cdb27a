"""The doctor finds threads and pins that cost speed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.tools.doctor import cores
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, Status
from test.engine.placement.test_core_division import VARIABLES, machine

ABSENT = 4095
"""A CPU that no test machine has."""


@pytest.fixture(autouse=True)
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def of_target() -> Finding:
    return cores.cores(Case(kind="cpu"))


def of_sidecar(given: str = "auto") -> Finding:
    case = Case(kind="cpu", draft_model="draft", settings=QSpecConfig(cores=given))
    return cores.sidecar_cores(case)


def test_hardware_threads_and_nodes_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path / "one", [(0, (0, 2)), (0, (1, 3))])
    assert of_target() == Finding(Status.OK, "4 CPUs on 2 cores, in 1 NUMA node")
    machine(monkeypatch, tmp_path / "two", [(0, (0,)), (1, (1,))])
    finding = of_target()
    assert finding.status is Status.WARNING
    assert "in 2 NUMA nodes: threads of one node wait" in finding.found


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OMP_NUM_THREADS", "many", "is no number of threads"),
        ("OMP_NUM_THREADS", "9999", "more threads than CPUs"),
        ("SGLANG_CPU_OMP_THREADS_BIND", "0-", "must be a list of CPU numbers"),
        ("SGLANG_CPU_OMP_THREADS_BIND", str(ABSENT), f"names CPU {ABSENT}"),
    ],
)
def test_threads_that_do_not_fit_the_cpus_are_a_warning(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"{name}={value}" not in of_target().found
    monkeypatch.setenv(name, value)
    finding = of_target()
    assert finding.status is Status.WARNING
    assert f"{name}={value}" in finding.found
    assert words in finding.found
    assert name in finding.advice


def test_a_container_with_the_time_of_fewer_cpus_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path / "cpus", [(0, (cpu,)) for cpu in range(8)])
    limit = tmp_path / "cpu.max"
    limit.write_text("250000 100000\n")
    monkeypatch.setattr(cores, "QUOTA", limit)
    finding = of_target()
    assert finding.status is Status.WARNING
    assert "the time of 2.5 CPUs only" in finding.found
    assert "OMP_NUM_THREADS=2" in finding.advice
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert of_target().status is Status.OK
    limit.write_text("max 100000\n")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert of_target().status is Status.OK


def test_a_sidecar_without_cores_of_its_own_is_a_warning_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path / "2", [(0, (0,)), (0, (1,))])
    finding = of_sidecar("shared")
    assert finding.status is Status.WARNING
    assert "--speculative-qspec-cores auto, with which it gets the CPUs 1" in finding.advice
    assert of_sidecar().status is Status.OK
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "because OMP_NUM_THREADS is set" in of_sidecar().found
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine(monkeypatch, tmp_path / "1", [(0, (0,))])
    assert "there is only one core" in of_sidecar().found


def test_a_pin_to_a_cpu_that_the_machine_lacks_is_a_failure() -> None:
    before = os.sched_getaffinity(0)
    finding = of_sidecar(str(ABSENT))
    assert finding.status is Status.FAILURE
    assert f"--speculative-qspec-cores is {ABSENT}" in finding.found
    some = of_sidecar(f"{min(before)},{ABSENT}")
    assert some.status is Status.WARNING
    assert f"cannot run on CPU {ABSENT}" in some.found
    assert os.sched_getaffinity(0) == before


def test_a_pin_to_a_cpu_that_the_target_keeps_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    finding = of_sidecar(str(cpu))
    assert finding.status is Status.WARNING
    assert f"both run on CPU {cpu}" in finding.found


def test_a_pin_beside_the_target_is_fine() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU")
    cpu = max(before)
    for cpus in (before, before - {cpu}):
        check_apart(cpu, cpus)


def check_apart(cpu: int, cpus: set[int]) -> None:
    """Fail unless a sidecar pinned to `cpu` is apart from a target that starts on `cpus`."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        finding = of_sidecar(str(cpu))
    finally:
        os.sched_setaffinity(0, before)
    # On a machine with hardware threads the CPU shares a core with one of the target's.
    assert "apart from the target" in finding.found or "share cores" in finding.found
