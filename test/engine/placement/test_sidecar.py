"""The sidecar gets the right device and memory, on machines with zero to eight GPUs."""

from typing import Any

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.placement.sidecar import DeviceChoice, choose
from sglang_qspec.sidecar.memory import GIB

DRAFT = 57 * GIB // 10
"""Weights of an 8B model with a 4-bit body and a vocabulary of 128k tokens in bfloat16."""
TARGET = 16 * GIB
"""Weights of an 8B model in bfloat16."""


def machine(*used: float, size: int = 80) -> list[Gpu]:
    """GPUs of `size` GiB of which the given numbers of GiB are in use."""
    return [
        Gpu(index, f"GPU-{index}", size * GIB, int(each * GIB)) for index, each in enumerate(used)
    ]


def place(gpus: list[Gpu], *held: int, **settings: Any) -> Placement:
    """The sidecar's placement beside ranks on the GPUs `held`, with no GPU claimed."""
    return decided(gpus, *held, **settings).placement


def decided(gpus: list[Gpu], *held: int, **settings: Any) -> DeviceChoice:
    return choose(
        QSpecConfig(**settings),
        on_cpu=False,
        held=frozenset(held),
        gpus=gpus,
        weights=DRAFT,
        claim=lambda _: True,
    )


def test_on_one_gpu_the_sidecar_shares_it_and_gets_a_fixed_part() -> None:
    assert place(machine(0), 0) == Placement("cuda:0", True, 0.15)


def test_with_two_gpus_it_gets_all_memory_of_the_one_that_the_target_does_not_hold() -> None:
    assert place(machine(0, 0), 0) == Placement("cuda:1")
    assert place(machine(0, 0), 1) == Placement("cuda:0")


def test_the_placement_names_the_gpus_among_which_its_device_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert place(machine(0, 0), 0) == Placement("cuda:1", visible="4,6")
    assert place(machine(0, 0), 0, draft_device="cpu").visible == "4,6"


def test_it_leaves_out_every_gpu_that_a_rank_holds() -> None:
    assert place(machine(*[0] * 8), 0, 1, 6, 7) == Placement("cuda:5")


def test_it_prefers_a_gpu_that_no_other_process_uses() -> None:
    assert place(machine(0, 0, 0, 60), 0) == Placement("cuda:2")


def test_beside_other_processes_it_takes_the_freest_gpu_and_a_fixed_part_of_it() -> None:
    assert place(machine(0, 30, 20, 70), 0) == Placement("cuda:2", False, 0.15)


def test_it_shares_the_targets_gpu_if_others_fill_all_the_rest() -> None:
    assert place(machine(0, 70, 60), 0) == Placement("cuda:0", True, 0.15)


def test_it_passes_over_a_gpu_that_another_servers_sidecar_has_claimed() -> None:
    placed = choose(
        QSpecConfig(),
        on_cpu=False,
        held=frozenset({0}),
        gpus=machine(0, 0, 0),
        weights=None,
        claim=lambda gpu: gpu.index != 2,
    )
    assert placed.placement == Placement("cuda:1")


def test_without_nvml_it_shares_the_targets_gpu() -> None:
    assert place([], 2, 3) == Placement("cuda:2", True, 0.15)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:1", Placement("cuda:1")),
        ("cuda:0", Placement("cuda:0", True, 0.15)),
        ("cuda", Placement("cuda:0", True, 0.15)),
        ("cpu", Placement("cpu", False, 0.15)),
    ],
)
def test_a_given_device_always_wins(device: str, expected: Placement) -> None:
    assert place(machine(0, 70, 0), 0, draft_device=device) == expected


def test_a_given_fraction_holds_on_every_device() -> None:
    for gpus in (machine(0), machine(0, 0), machine(0, 30)):
        assert place(gpus, 0, mem_fraction=0.3).mem_fraction == 0.3
    assert place(machine(0), 0, mem_fraction=0.3, draft_device="cpu").mem_fraction == 0.3


def test_a_cpu_server_has_its_sidecar_on_the_cpu_unless_a_gpu_is_asked_for() -> None:
    common: dict[str, Any] = {
        "on_cpu": True,
        "held": frozenset({0}),
        "gpus": machine(0),
        "weights": None,
        "claim": lambda _: True,
    }
    assert choose(QSpecConfig(), **common).placement == Placement("cpu", False, 0.15)
    asked = choose(QSpecConfig(draft_device="cuda:0"), **common)
    assert asked.placement == Placement("cuda:0")
