"""The plugin that counts and delays collective operations."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from benchmark.bench_tensor_parallel import NONE, QSPEC, configuration
from benchmark.harness.configuration import Settings
from benchmark.tensor_parallel.links import FOLDER, Counts, Links, slowed


def test_only_operations_on_the_devices_group_count_and_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    counts, delay = np.zeros(2, np.int64), np.array([0.5])
    seen: list[Any] = []
    function = slowed(lambda *o, **g: seen.append((o, g)), delay, counts, lambda g: g == "devices")
    operand = torch.zeros(6)
    function(operand, group="devices")
    function(operand, group="hosts")
    delay[0] = 0.0
    function(operand, 1, group="devices")
    assert counts.tolist() == [2, 48]
    assert slept == [0.0005]
    assert len(seen) == 3


def test_the_delay_changes_in_place_and_counts_come_back() -> None:
    with Links() as links:
        folder = Path(links.environment[FOLDER])
        mapped = np.memmap(folder / "delay", np.float64, "r")
        written = np.memmap(folder / "counts", np.int64, "r+")
        assert links.delay_ms == mapped[0] == 0.0
        links.delay_ms = 2.5
        assert links.delay_ms == mapped[0] == 2.5
        written[:] = (3, 700)
        assert links.counts == Counts(3, 700)


def test_a_server_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    with Links() as links:
        monkeypatch.setattr(sys, "path", links.environment["PYTHONPATH"].split(":"))
        (found,) = (
            point
            for point in importlib.metadata.entry_points(group="sglang.srt.plugins")
            if point.name == "qspec_links"
        )
        assert found.load().__module__ == "benchmark.tensor_parallel.links"


def test_both_servers_have_the_ranks_and_the_plugin() -> None:
    settings = Settings(Path("target"), Path("draft"), "float32", 2, 512, False)
    for name in (NONE, QSPEC):
        found = configuration(name, settings, 3, {"KEY": "value"})
        assert found.flags[found.flags.index("--tp-size") + 1] == "3"
        server = found.server()
        assert server._environment["KEY"] == "value"
        assert server._environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 2
        assert found.has_sidecar is (name == QSPEC)
