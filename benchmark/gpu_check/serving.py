"""The servers of the check, and their passes inside and outside CUDA graphs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmark.gpu_check.findings import Options
from benchmark.harness.configuration import Settings
from benchmark.harness.options import split_cores
from benchmark.harness.server import Server
from benchmark.harness.speculation import state_of
from sglang_qspec.tools.models import demo_models

LOGGING = ("--log-level", "info")
"""Flags with which QSPEC logs what it captured."""
CAPTURED = re.compile(r"(?:Target passes run in|No) CUDA graphs.*")
"""QSPEC's log messages about captured graphs, with time and memory, and about omitted graphs."""


def demo_settings(options: Options, dtype: str, slots: int) -> Settings:
    """The settings of servers with the demo models."""
    demo = demo_models(on_cuda=options.on_gpu)
    return settings(options, demo.target, demo.draft, dtype, slots, 2048)


def settings(
    options: Options, model: Path, draft: Path, dtype: str, slots: int, context_length: int
) -> Settings:
    """The settings of servers on the device; on a CPU target and sidecar have cores of their own.

    The check's own flags win over those of the benchmarks.
    """
    target, sidecar = split_cores(options.on_gpu)
    lengths = (slots, context_length, options.on_gpu)
    return Settings(model, draft, dtype, *lengths, target, sidecar, flags=tuple(options.flags))


def capability() -> tuple[int, int]:
    """The compute capability of the GPU."""
    import torch

    return torch.cuda.get_device_capability()


@dataclass(frozen=True)
class Passes:
    """Decode and verify passes of a server since its start."""

    total: int
    eager: int
    """Passes outside CUDA graphs."""

    def since(self, before: Passes) -> Passes:
        return Passes(self.total - before.total, self.eager - before.eager)


def passes_of(server: Server) -> Passes:
    """The passes so far."""
    state = state_of(server)
    total = sum(counts["passes"] for counts in state["pipelines"].values())
    return Passes(total, state["eager_passes"])


def captured(log: str) -> list[str]:
    """The messages about captured graphs in a server's log."""
    found: list[str] = CAPTURED.findall(log)
    return found
