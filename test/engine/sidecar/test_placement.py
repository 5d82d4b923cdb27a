"""The sidecar gets the right device and memory, on machines with zero to eight GPUs."""

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement import devices as placement
from sglang_qspec.engine.placement.devices import Decision, Gpu, decide
from sglang_qspec.engine.placement.processes import Placement
from sglang_qspec.errors import ConfigError
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
    """The placement of a CUDA server whose ranks hold `held`, if nobody has claimed a GPU."""
    return decided(gpus, *held, **settings).placement


def decided(gpus: list[Gpu], *held: int, **settings: Any) -> Decision:
    return decide(
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
    placed = decide(
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
    assert decide(QSpecConfig(), **common).placement == Placement("cpu", False, 0.15)
    asked = decide(QSpecConfig(draft_device="cuda:0"), **common)
    assert asked.placement == Placement("cuda:0")


def test_a_draft_model_too_large_for_the_usual_part_gets_what_it_needs() -> None:
    assert placement.default_fraction(machine(0, size=24)[0], DRAFT) == 0.41
    assert placement.default_fraction(machine(0)[0], DRAFT) == 0.15


def test_too_little_memory_for_the_draft_model_is_one_sentence_with_the_numbers() -> None:
    decision = decided(machine(0), 0, mem_fraction=0.05)
    with pytest.raises(
        ConfigError,
        match=r"mem-fraction is 0\.05, which is 4\.0 GiB of cuda:0, but the draft model has "
        r"5\.7 GiB of weights and needs 2\.0 GiB to run: give it more than 0\.10",
    ):
        placement.check_sidecar(decision, DRAFT)
    placement.check_sidecar(decided(machine(0), 0), DRAFT)
    placement.check_sidecar(decision, None)


def test_an_8b_target_and_its_4_bit_copy_fit_on_80_gb_by_default() -> None:
    decision = decided(machine(0.5), 0)
    fraction = placement.target_fraction(decision, 0.84, TARGET, given=False)
    before = 80 * GIB - GIB // 2 - GIB  # after the target's CUDA context
    target_kv = before * fraction - TARGET
    sidecar = decision.placement.mem_fraction * 80 * GIB
    assert target_kv > 35 * GIB
    assert sidecar - DRAFT > 6 * GIB
    # What SGLang leaves for activations and graphs stays, on top of the sidecar's part.
    assert before * (1 - fraction) - sidecar >= before * 0.16


def test_the_targets_fraction_falls_by_more_if_other_processes_use_the_gpu() -> None:
    """SGLang's fraction refers to what is free before the weights load, the sidecar's to all."""
    decision = decided(machine(40), 0, draft_device="cuda:0")
    left = placement.target_fraction(decision, 0.84, None, given=False)
    assert 39 * GIB * (0.84 - left) >= 12 * GIB


def test_a_target_that_does_not_fit_beside_the_sidecar_is_one_sentence_with_the_numbers() -> None:
    decision = decided(machine(0, size=24), 0)
    with pytest.raises(
        ConfigError,
        match=r"the sidecar takes 0\.41 of cuda:0 \(9\.8 GiB of 24\.0 GiB\), so the target gets "
        r"\d+\.\d GiB of this GPU for weights and KV, and has 16\.0 GiB of weights: lower",
    ):
        placement.target_fraction(decision, 0.85, TARGET, given=False)
    with pytest.raises(ConfigError, match="the target gets nothing of this GPU"):
        placement.target_fraction(decision, 0.3, TARGET, given=False)


def test_a_given_mem_fraction_static_is_kept_or_refused_but_never_changed() -> None:
    decision = decided(machine(0), 0)
    assert placement.target_fraction(decision, 0.7, TARGET, given=True) == 0.7
    with pytest.raises(ConfigError, match=r"--mem-fraction-static is 0\.85.*give at most 0\.80"):
        placement.target_fraction(decision, 0.85, TARGET, given=True)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, {0}),
        ({"base_gpu_id": 1}, {1}),
        ({"tp_size": 4, "base_gpu_id": 2}, {2, 3, 4, 5}),
        ({"tp_size": 2, "gpu_id_step": 2}, {0, 2}),
        ({"tp_size": 2, "pp_size": 2}, {0, 1, 2, 3}),
        ({"tp_size": 2, "dp_size": 2}, {0, 1, 2, 3}),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, {0, 1, 2, 3}),
        ({"tp_size": 16, "nnodes": 2}, set(range(8))),
    ],
)
def test_the_held_gpus_are_those_of_sglangs_ranks(changes: dict[str, Any], held: set[int]) -> None:
    plain = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "enable_dp_attention": False,
    }
    assert placement.held_gpus(SimpleNamespace(**{**plain, **changes})) == held


@pytest.fixture
def own_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(placement, "_claims", {})
    yield
    placement.release()


@pytest.mark.usefixtures("own_directory")
def test_a_claimed_gpu_is_refused_to_other_processes_until_the_claim_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (gpu,) = machine(0)
    assert placement.claim(gpu)
    assert placement.claim(gpu)  # its own claim
    ours = placement._claims
    monkeypatch.setattr(placement, "_claims", {})  # as in another process
    assert not placement.claim(gpu)
    assert placement.claim(replace(gpu, uuid="GPU-other"))
    placement.release()
    monkeypatch.setattr(placement, "_claims", ours)
    placement.release()
    assert placement.claim(gpu)


@pytest.mark.usefixtures("own_directory")
def test_a_claim_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = machine(0)
    placement._claim_directory()
    real = os.geteuid()
    path = placement._claim_directory()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    os.rename(path, path.replace(f"_{real}", f"_{real + 1}"))
    with pytest.raises(PermissionError, match="belongs to another user"):
        placement._claim_directory()
    assert placement.claim(gpu)  # without a lock, the measured memory alone decides
    assert not placement._claims


def test_the_size_of_a_checkpoint_is_that_of_its_weight_files(tmp_path: Any) -> None:
    assert placement.weight_bytes("someone/model") is None
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    assert placement.weight_bytes(str(tmp_path)) is None
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(100 * number))
    assert placement.weight_bytes(str(tmp_path)) == 300
