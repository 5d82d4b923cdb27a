"""Target and sidecar get parts of a device's memory that hold their models."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.placement.memory import (
    check_sidecar,
    default_fraction,
    target_fraction,
    weight_bytes,
)
from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar.memory import GIB
from test.engine.placement import test_sidecar
from test.engine.placement.test_sidecar import DRAFT, TARGET, machine


def decided(gpus: list[Gpu], *held: int, **settings: Any) -> tuple[Placement, Gpu | None]:
    """The placement of the sidecar, and its GPU."""
    choice = test_sidecar.decided(gpus, *held, **settings)
    return choice.placement, choice.gpu


def test_a_draft_model_too_large_for_the_usual_part_gets_what_it_needs() -> None:
    assert default_fraction(machine(0, size=24)[0], DRAFT) == 0.43
    assert default_fraction(machine(0)[0], DRAFT) == 0.15


def test_too_little_memory_for_the_draft_model_is_one_sentence_with_the_numbers() -> None:
    on = decided(machine(0), 0, mem_fraction=0.05)
    with pytest.raises(
        ConfigError,
        match=r"mem-fraction is 0\.05, which is 4\.0 GiB of cuda:0, but the draft model has "
        r"5\.7 GiB of weights and needs 2\.5 GiB to run: give it more than 0\.10",
    ):
        check_sidecar(*on, DRAFT)
    check_sidecar(*decided(machine(0), 0), DRAFT)
    check_sidecar(*on, None)


def test_an_8b_target_and_its_4_bit_copy_fit_on_80_gb_by_default() -> None:
    on = decided(machine(0.5), 0)
    fraction = target_fraction(*on, 0.84, TARGET, given=False)
    before = 80 * GIB - GIB // 2 - GIB  # after the target's CUDA context
    target_kv = before * fraction - TARGET
    sidecar = on[0].mem_fraction * 80 * GIB
    assert target_kv > 35 * GIB
    assert sidecar - DRAFT > 6 * GIB
    # What SGLang leaves for activations and graphs stays, on top of the sidecar's part.
    assert before * (1 - fraction) - sidecar >= before * 0.16


def test_the_targets_fraction_falls_by_more_if_other_processes_use_the_gpu() -> None:
    """SGLang's fraction refers to what is free before the weights load, the sidecar's to all."""
    on = decided(machine(40), 0, draft_device="cuda:0")
    left = target_fraction(*on, 0.84, None, given=False)
    assert 39 * GIB * (0.84 - left) >= 12 * GIB


def test_a_target_that_does_not_fit_beside_the_sidecar_is_one_sentence_with_the_numbers() -> None:
    on = decided(machine(0, size=24), 0)
    with pytest.raises(
        ConfigError,
        match=r"the sidecar takes 0\.43 of cuda:0 \(10\.3 GiB of 24\.0 GiB\), so the target gets "
        r"\d+\.\d GiB of this GPU for weights and KV, and has 16\.0 GiB of weights: lower",
    ):
        target_fraction(*on, 0.85, TARGET, given=False)
    with pytest.raises(ConfigError, match="the target gets nothing of this GPU"):
        target_fraction(*on, 0.3, TARGET, given=False)


def test_a_given_mem_fraction_static_is_kept_or_refused_but_never_changed() -> None:
    on = decided(machine(0), 0)
    assert target_fraction(*on, 0.7, TARGET, given=True) == 0.7
    with pytest.raises(ConfigError, match=r"--mem-fraction-static is 0\.85.*give at most 0\.80"):
        target_fraction(*on, 0.85, TARGET, given=True)


def test_the_size_of_a_checkpoint_is_that_of_its_weight_files(tmp_path: Any) -> None:
    assert weight_bytes("someone/model") is None
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    assert weight_bytes(str(tmp_path)) is None
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(100 * number))
    assert weight_bytes(str(tmp_path)) == 300
