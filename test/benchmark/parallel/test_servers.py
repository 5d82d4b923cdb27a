"""The servers differ in speculation and cores; all pipelines share one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmark.harness.configuration import Settings
from benchmark.parallel.plan import BASELINES, NAMES, configuration

SETTINGS = Settings(Path("target"), Path("draft"), "bfloat16", 32, 384, False, (3,), (5,))


def test_there_are_three_servers_and_one_has_a_sidecar() -> None:
    servers = {configuration(name, SETTINGS, 16).server_key for name in NAMES}
    assert len(servers) == 3
    for name in NAMES:
        chosen = configuration(name, SETTINGS, 16)
        assert chosen.has_sidecar == (name not in BASELINES)
        assert chosen.cores == ((3, 5) if name == "none-equal" else (3,))


def test_the_sidecar_has_its_own_cores_and_passes_reach_the_requested_width() -> None:
    flags = configuration("halves", SETTINGS, 16).flags
    assert flags[flags.index("--speculative-qspec-cores") + 1] == "5"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "16"


def test_on_a_gpu_target_and_sidecar_share_the_first_device() -> None:
    settings = replace(SETTINGS, on_gpu=True, target_cores=(), sidecar_cores=())
    flags = configuration("halves", settings, 16).flags
    assert flags[flags.index("--speculative-qspec-draft-device") + 1] == "cuda:0"
    assert "--speculative-qspec-cores" not in flags
