"""Where target and draft model run, as a server on this machine would place them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_qspec.config import AUTO_CORES, QSpecConfig
from sglang_qspec.engine.placement import core_division, sidecar
from sglang_qspec.engine.placement.devices import visible_gpus
from sglang_qspec.engine.placement.memory import weight_bytes
from sglang_qspec.errors import ConfigError
from sglang_qspec.values import parse_cores


@dataclass(frozen=True)
class ModelPlacement:
    """Devices and CPUs of target and draft model."""

    device: str
    """Kind of the target's device: `cpu` or `cuda`."""
    draft_device: str
    """`cpu`, or `cuda:N`, numbered among the visible GPUs."""
    cpus: frozenset[int]
    """CPUs of both together."""
    draft_cpus: frozenset[int] = frozenset()
    """CPUs of the draft model alone; empty if it shares all."""

    @property
    def draft_cores(self) -> str:
        """CPUs of the draft model alone, as a setting names them; empty if it shares all."""
        return _listed(self.draft_cpus)

    @property
    def target_cpus(self) -> frozenset[int]:
        """CPUs of the target beside a draft model."""
        return self.cpus - self.draft_cpus

    @property
    def overlaps(self) -> bool:
        """Whether the draft model can draft while the target verifies, without slowing it."""
        shares_gpu = self.device == "cuda" and self.draft_device == "cuda:0"
        shares_cpus = self.device == self.draft_device == "cpu" and not self.draft_cpus
        return not (shares_gpu or shares_cpus)

    def __str__(self) -> str:
        if self.draft_cpus:
            return f"target on CPUs {_listed(self.target_cpus)}, draft on {self.draft_cores}"
        shared = "" if self.overlaps else ", which they share"
        return f"target on {self.device}, draft model on {self.draft_device}{shared}"


def place_models(
    draft: str, *, device: str, draft_device: str = "", cores: str = AUTO_CORES
) -> ModelPlacement:
    """Place a target on `device` and the model `draft`.

    `cores` are the draft model's CPUs; `auto` divides the CPUs as the setting of that name does. An
    empty text lets both use all. Raises ConfigError for CPUs that this process does not have.
    """
    cpus = frozenset(os.sched_getaffinity(0))
    choice = sidecar.choose(
        QSpecConfig(draft_device=draft_device, cores=cores),
        on_cpu=device == "cpu",
        held=frozenset() if device == "cpu" else frozenset({0}),
        gpus=visible_gpus(),
        weights=weight_bytes(draft),
        claim=lambda _gpu: True,
    )
    found = choice.placement.device
    if device != "cpu" or found != "cpu":
        return ModelPlacement(device, found, cpus)
    asked = QSpecConfig(cores=cores)
    divides = cores == AUTO_CORES
    own = parse_cores((core_division.sidecar_cpus if divides else core_division.pinned_cpus)(asked))
    if not own < cpus:
        raise ConfigError(
            f"--cores is {cores!r}, but must be some of this process's CPUs, {_listed(cpus)}, "
            "and leave one for the target"
        )
    return ModelPlacement(device, found, cpus, own)


def default_device() -> str:
    """`cuda` if torch finds a GPU, otherwise `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _listed(cpus: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
