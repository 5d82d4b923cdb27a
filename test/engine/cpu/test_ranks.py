"""Several ranks on one machine's CPUs: process groups without NCCL, and cores of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from sglang_qspec.engine.cpu import ranks
from sglang_qspec.engine.cpu.ranks import groups_of, place
from sglang_qspec.errors import ConfigError
from test import forked

BIND = "SGLANG_CPU_OMP_THREADS_BIND"
CORES = [frozenset((number, number + 8)) for number in range(5)]


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BIND, "all")
    monkeypatch.setattr(ranks, "get_cpu_ids_by_node", lambda: ["0-4,8-12"])


def test_each_rank_gets_as_many_whole_cores() -> None:
    assert groups_of(2, CORES) == ["0,8,1,9", "2,10,3,11"]
    place(2, CORES)
    assert os.environ[BIND] == "0,8,1,9|2,10,3,11"


@pytest.mark.parametrize(
    ("spare", "expected"), [(1, "0,8,1,9|2,10,3,11"), (3, "0,8|1,9"), (9, "0,8|1,9")]
)
def test_spare_cores_stay_free_if_there_are_enough(spare: int, expected: str) -> None:
    place(2, CORES, spare=spare)
    assert os.environ[BIND] == expected


def test_one_rank_and_the_users_own_groups_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    place(1, CORES)
    assert os.environ[BIND] == "all"
    monkeypatch.setenv(BIND, "0|1")
    place(2, CORES)
    assert os.environ[BIND] == "0|1"


def test_too_few_cores_are_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="6 ranks .--tp-size.* 5 CPU cores"):
        place(6, CORES)


def pinned(cpu: int) -> tuple[set[int], int]:
    ranks.pin(frozenset([cpu]))
    return os.sched_getaffinity(0), torch.get_num_threads()


def test_a_rank_runs_on_its_cpus_with_a_thread_on_each() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert forked.run(pinned, cpu) == ({cpu}, 1)


@pytest.mark.parametrize(("backend", "expected"), [("gloo", False), ("nccl", None)])
def test_only_a_group_on_cpus_has_no_nccl_communicator(backend: str, expected: bool | None) -> None:
    def make(*args: Any, use_pynccl: bool | None = None, **given: Any) -> bool | None:
        return use_pynccl

    assert ranks._without_nccl(make)([[0, 1]], 0, backend, group_name="tp") is expected


def test_the_controller_waits_for_a_message_only_where_it_would_not_wait() -> None:
    calls: list[object] = []

    class Socket:
        def poll(self, milliseconds: int) -> None:
            calls.append(milliseconds)

    def receive(socket: Socket, flags: int = 0) -> str:
        calls.append(flags)
        return "a message"

    received = ranks._wait_first(receive)
    assert received(Socket()) == received(Socket(), flags=1) == "a message"
    assert calls == [0, ranks.CONTROLLER_WAIT_MS, 1]
