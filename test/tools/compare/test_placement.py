"""Where target and draft model run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from sglang_qspec.engine.placement import core_division
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.compare.command import add_options
from sglang_qspec.tools.compare.placement import ModelPlacement, place_models

CPUS = frozenset(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)


def test_auto_divides_the_cpus_as_a_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    last = max(CPUS)
    monkeypatch.setattr(core_division, "sidecar_cpus", lambda _settings: str(last))
    found = place_models("draft", device="cpu")
    assert found == ModelPlacement("cpu", "cpu", CPUS, frozenset({last}))
    assert found.overlaps == (len(CPUS) > 1)
    assert found.target_cpus == CPUS - {last}


def test_shared_cpus_are_those_of_both() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    cores = parser.parse_args(["--target", "t", "--draft", "d", "--cores", "shared"]).cores
    found = place_models("draft", device="cpu", cores=cores)
    assert (found.draft_cpus, found.target_cpus, found.overlaps) == (frozenset(), CPUS, False)


def test_cpus_that_leave_none_for_the_target_are_refused() -> None:
    everything = ",".join(map(str, CPUS))
    with pytest.raises(ConfigError, match=r"--cores is .*leave one for the target"):
        place_models("draft", device="cpu", cores=everything)


@pytest.mark.parametrize(
    ("device", "draft_device", "overlaps"),
    [("cuda", "cuda:0", False), ("cuda", "cuda:1", True), ("cuda", "cpu", True)],
)
def test_only_models_on_devices_of_their_own_overlap(
    device: str, draft_device: str, overlaps: bool
) -> None:
    assert ModelPlacement(device, draft_device, CPUS).overlaps is overlaps


def test_a_process_that_reads_answers_imports_no_torch_before_it_has_its_cpus() -> None:
    script = (
        "import sys, sglang_qspec.__main__, sglang_qspec.tools.measure.loaded_model\n"
        "print({'torch', 'sglang', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
