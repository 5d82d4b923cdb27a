"""The servers that are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.harness.configuration import Settings
from benchmark.queueing.configurations import NAMES, configuration

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, False, (3,), (5,))


def flags(name: str, settings: Settings = SETTINGS) -> list[str]:
    return configuration(name, settings).server().command


@pytest.mark.parametrize("name", NAMES)
def test_configurations_differ_only_in_speculation_and_cores(name: str) -> None:
    speculation = configuration(name, SETTINGS).flags
    command, plain = flags(name), flags("none")
    assert all(flag.startswith("--speculative") for flag in speculation[::2])
    # The port is each server's own.
    port = plain.index("--port") + 1
    del command[port], plain[port]
    assert command == [*plain, *speculation]


def test_the_equal_hardware_baseline_has_the_cores_of_target_and_sidecar() -> None:
    assert configuration("none", SETTINGS).cores == (3,)
    assert configuration("qspec-8", SETTINGS).cores == (3,)
    for name in ("none", "ngram", "lookup"):
        plain, equal = (configuration(n, SETTINGS) for n in (name, f"{name}-equal"))
        assert (plain.cores, equal.cores) == ((3,), (3, 5))
        assert plain.flags == equal.flags
    speculation = configuration("qspec-8", SETTINGS).flags
    assert speculation[speculation.index("--speculative-qspec-cores") + 1] == "5"


def test_only_queue_configurations_have_a_sidecar_and_their_names_give_the_completions() -> None:
    for name in NAMES:
        command = flags(name)
        assert configuration(name, SETTINGS).has_sidecar == name.startswith("qspec")
        assert ("--speculative-draft-model-path" in command) == name.startswith("qspec")
        if name.startswith("qspec"):
            served = command[command.index("--speculative-qspec-completions") + 1]
            asked = configuration(name, SETTINGS).custom_params.get("qspec_completions", served)
            assert name == f"qspec-{asked}"


def test_on_a_gpu_target_and_sidecar_share_the_first_device() -> None:
    command = flags("qspec-4", replace(SETTINGS, on_gpu=True, target_cores=(), sidecar_cores=()))
    assert command[command.index("--speculative-qspec-draft-device") + 1] == "cuda:0"
    assert "--device" not in command
    assert "--speculative-qspec-cores" not in command
