"""The sidecar gets whole cores, unless the user has placed it or the target's threads."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from sglang.srt.utils import numa_utils

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement import core_division
from sglang_qspec.engine.placement.core_division import (
    left_cpus,
    pinned_cpus,
    shares_cpus,
    sidecar_cpus,
)

VARIABLES = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND")


def machine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    cores: Iterable[tuple[int, tuple[int, ...]]],
    allowed: set[int] | None = None,
) -> None:
    """A machine with `cores`, each with its NUMA node and its CPUs."""
    cpus: set[int] = set()
    for node, siblings in cores:
        for cpu in siblings:
            topology = folder / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            text = ",".join(map(str, siblings))
            (topology / "thread_siblings_list").write_text(text + "\n")
            (folder / f"cpu{cpu}" / f"node{node}").mkdir()
        cpus.update(siblings)
    monkeypatch.setattr(core_division, "_TOPOLOGY", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed or cpus)


@pytest.fixture(autouse=True)
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def divided(cores: str = "auto") -> str:
    return sidecar_cpus(QSpecConfig(cores=cores))


def test_the_sidecar_gets_a_quarter_of_the_cores_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path / "2", [(0, (0,)), (0, (1,))])
    assert divided() == "1"
    machine(monkeypatch, tmp_path / "12", [(0, (cpu,)) for cpu in range(12)])
    assert divided() == "9,10,11"


def test_hardware_threads_of_a_core_stay_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu, cpu + 4)) for cpu in range(4)])
    assert divided() == "3,7"


def test_the_cores_come_from_the_last_numa_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CPUs of node 1 have the lower numbers here."""
    cores = [(1, (0,)), (1, (1,)), (0, (2,)), (0, (3,))]
    machine(monkeypatch, tmp_path, cores)
    assert divided() == "1"


def test_only_cpus_that_the_server_may_use_are_divided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path / "8", [(0, (cpu,)) for cpu in range(8)], allowed={2, 3})
    assert divided() == "3"
    machine(monkeypatch, tmp_path / "one", [(0, (0, 1))])
    assert divided() == ""


def test_without_the_setting_or_with_placed_threads_nothing_is_divided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu,)) for cpu in range(4)])
    assert divided() == "3"
    for cores in ("1", ""):
        assert divided(cores) == ""
    for name in VARIABLES:
        monkeypatch.setenv(name, "4")
        assert divided() == ""
        monkeypatch.delenv(name)
    assert pinned_cpus(QSpecConfig(cores="2-3")) == "2-3"
    assert pinned_cpus(QSpecConfig(cores="auto")) == ""


def test_a_kernel_without_a_topology_has_cores_of_one_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_division, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert divided() == "1"


def test_target_and_sidecar_share_cpus_unless_they_are_divided_or_pinned_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, [(0, (0,)), (0, (1,))])
    assert shares_cpus(QSpecConfig(cores="shared"))
    assert shares_cpus(QSpecConfig(cores="0-1"))
    assert not shares_cpus(QSpecConfig(cores="1-2"))
    assert not shares_cpus(QSpecConfig(cores="2"))
    assert not shares_cpus(QSpecConfig(cores="auto"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert shares_cpus(QSpecConfig(cores="auto"))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [("0|1", ("2,3", False)), ("0-1|2-3", ("3", True)), ("0,1|2", ("3", False))],
)
def test_a_sidecar_beside_several_ranks_gets_what_they_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, expected: tuple[str, bool]
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu,)) for cpu in range(4)])
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", groups)
    assert core_division.beside_ranks(len(groups.split("|"))) == expected


def test_a_sidecar_beside_ranks_gets_no_second_thread_of_their_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu, cpu + 4)) for cpu in range(4)])
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0,1|2")
    assert core_division.beside_ranks(2) == ("3,7", False)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0,1|2,3")
    assert core_division.beside_ranks(2) == ("3,7", True)


@pytest.mark.parametrize(("ranks", "expected"), [(2, ("3", True)), (1, ("2,3", False))])
def test_ranks_on_numa_nodes_of_their_own_leave_the_other_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, expected: tuple[str, bool]
) -> None:
    machine(monkeypatch, tmp_path, [(cpu // 2, (cpu,)) for cpu in range(4)])
    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0,1", "2,3"])
    assert core_division.beside_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("cores", "left"),
    [("3", "3"), ("0,2", "0,2"), ("3-9", "3"), ("8", ""), ("0-3", ""), ("auto", "")],
)
def test_the_target_leaves_the_cpus_that_the_sidecar_is_pinned_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: str, left: str
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu,)) for cpu in range(4)])
    settings = QSpecConfig(cores=cores)
    assert left_cpus(settings) == left
    assert shares_cpus(settings) is (cores == "0-3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert left_cpus(settings) == ""
    assert shares_cpus(settings) is (cores != "8")


def test_a_pinned_sidecar_beside_ranks_shares_the_cpus_of_no_other_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, [(0, (cpu,)) for cpu in range(4)])
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1,2")
    assert shares_cpus(QSpecConfig(cores="2"), ranks=2)
    assert not shares_cpus(QSpecConfig(cores="3"), ranks=2)
