"""Places the server's own sidecar, before the target sizes its KV.

The process that reads the arguments does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_qspec import config
from sglang_qspec.config import SHARED_FRACTION, QSpecConfig
from sglang_qspec.engine.placement import claims, core_division, devices, environment, memory
from sglang_qspec.engine.placement.devices import UNUSED, Gpu
from sglang_qspec.engine.placement.environment import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceChoice:
    """A placement, and the GPU it is on."""

    placement: Placement
    gpu: Gpu | None = None
    """None on a CPU, or if NVML does not answer."""


def reserve(view: Any, settings: QSpecConfig, *, given: bool) -> float:
    """Place the sidecar, and return the `mem_fraction_static` that leaves room for it."""
    fraction: float = view.mem_fraction_static
    path = view.speculative_draft_model_path
    if path is None or settings.endpoint or devices.kind_of(view) not in ("cpu", "cuda"):
        return fraction
    weights = memory.draft_bytes(path)
    choice = choose(
        settings,
        on_cpu=devices.kind_of(view) == "cpu",
        held=devices.held_gpus(view),
        gpus=devices.visible_gpus(),
        weights=weights,
        claim=claims.OF_PROCESS.claim,
    )
    placed = choice.placement
    if devices.kind_of(view) == placed.device == "cpu":
        placed = core_division.divide(placed, settings, view.tp_size * view.dp_size)
    memory.check_sidecar(placed, choice.gpu, weights)
    if view.dp_size > 1:
        placed = replace(placed, endpoint=claims.OF_PROCESS.open_endpoint())
    environment.write(placed)
    if not placed.shared:
        return fraction
    target = memory.weight_bytes(view.model_path)
    ranks = view.tp_size * view.pp_size
    left = memory.target_fraction(
        placed,
        choice.gpu,
        fraction,
        None if target is None else target // ranks,
        given=given,
    )
    logger.info(
        "The sidecar shares %s with the target and takes %g of its memory; the target's "
        "mem_fraction_static is %g.",
        placed.device,
        placed.mem_fraction,
        left,
    )
    return left


def choose(
    settings: QSpecConfig,
    *,
    on_cpu: bool,
    held: frozenset[int],
    gpus: Sequence[Gpu],
    weights: int | None,
    claim: Callable[[Gpu], bool],
) -> DeviceChoice:
    """Choose the sidecar's device, and its fraction of the device's memory.

    A device in `settings` always wins. Without one, the sidecar takes the last unused GPU that is
    not in `held`. If there is none, it takes a GPU outside `held` with at least half of its memory
    free. `claim` must grant both. Otherwise the sidecar shares the target's GPU. `weights` is the
    size of the draft model in bytes, or None if unknown.
    """
    if on_cpu and not settings.draft_device.startswith("cuda"):
        return _on_cpu(settings)
    if settings.draft_device == "cpu":
        return _on_cpu(settings)
    asked = settings.draft_device.removeprefix("cuda").removeprefix(":")
    if settings.draft_device:
        index = int(asked or 0)
        gpu = next((gpu for gpu in gpus if gpu.index == index), None)
        shared = not on_cpu and index in held
        return _placed(settings, index, gpu, shared=shared, alone=not shared, weights=weights)
    others = sorted((gpu for gpu in gpus if gpu.index not in held), key=lambda gpu: -gpu.index)
    for gpu in others:
        if gpu.used <= UNUSED * gpu.total and claim(gpu):
            return _placed(settings, gpu.index, gpu, shared=False, alone=True, weights=weights)
    for gpu in sorted(others, key=lambda gpu: gpu.used / gpu.total):
        if gpu.free >= gpu.total / 2 and claim(gpu):
            return _placed(settings, gpu.index, gpu, shared=False, alone=False, weights=weights)
    index = min(held)
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    return _placed(settings, index, gpu, shared=True, alone=False, weights=weights)


def _on_cpu(settings: QSpecConfig) -> DeviceChoice:
    fraction = settings.mem_fraction or SHARED_FRACTION
    return DeviceChoice(Placement("cpu", mem_fraction=fraction, visible=config.visible_gpus()))


def _placed(
    settings: QSpecConfig,
    index: int,
    gpu: Gpu | None,
    *,
    shared: bool,
    alone: bool,
    weights: int | None,
) -> DeviceChoice:
    fraction = settings.mem_fraction
    if not fraction and not alone:
        fraction = memory.default_fraction(gpu, weights)
    return DeviceChoice(Placement(f"cuda:{index}", shared, fraction, config.visible_gpus()), gpu)
