"""The target's threads move between all CPUs and those that the sidecar leaves."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from sglang_qspec.engine.placement.target_cores import TargetCores

ALL = frozenset(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


@pytest.fixture
def cores() -> Iterator[TargetCores]:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(ALL))
    found = TargetCores(frozenset([max(ALL)]))
    yield found
    found.use(everything=True)
    torch.set_num_threads(threads)


def test_every_thread_moves_and_torch_has_a_thread_for_each_cpu(cores: TargetCores) -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    own = ALL - {max(ALL)}
    try:
        for everything, cpus in ((False, own), (True, ALL), (False, own)):
            assert cores.use(everything=everything) == len(cpus) == torch.get_num_threads()
            assert other.native_id is not None
            for thread in (0, other.native_id):
                assert os.sched_getaffinity(thread) == cpus
    finally:
        done.set()
        other.join()


def test_torch_keeps_its_threads_for_each_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two hardware threads a core, torch has a thread for each core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    cores = TargetCores(frozenset((6, 7, 14, 15)))
    cores.use(everything=False)
    cores.use(everything=True)
    assert given == [6, 8]


def test_the_ratio_is_the_largest_speedup_by_all_cpus(cores: TargetCores) -> None:
    assert cores.ratio == len(ALL) / (len(ALL) - 1)
