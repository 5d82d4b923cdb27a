"""The servers that are compared: they differ in their speculation, and in nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmark.demo import split_cores
from benchmark.server import Server

BASELINE = "none"
BASELINE_ALL_CORES = "none-equal"
LARGEST = "qspec-8"
COMPLETIONS = {"qspec-1": 1, "qspec-2": 2, "qspec-4": 4, LARGEST: 8}
NAMES = (BASELINE, BASELINE_ALL_CORES, "ngram", "lookup", *COMPLETIONS)

DESCRIPTIONS = {
    BASELINE: "no speculation, on the target's core",
    BASELINE_ALL_CORES: "no speculation, on the cores of target and sidecar together",
    "ngram": "SGLang's own NGRAM speculation as it comes",
    "lookup": "QSPEC without a draft model: drafts from a request's prompt and output",
    **{name: f"QSPEC, {n} drafted completions" for name, n in COMPLETIONS.items()},
}


@dataclass(frozen=True)
class Settings:
    """What all configurations share."""

    model: Path
    draft_model: Path
    dtype: str
    slots: int
    """Requests that run at once."""
    context_length: int
    """Tokens, of prompt and output together."""
    on_gpu: bool


@dataclass(frozen=True)
class Configuration:
    """One server to be."""

    name: str
    settings: Settings
    speculation: tuple[str, ...]
    cores: tuple[int, ...]

    @property
    def has_sidecar(self) -> bool:
        return self.name in COMPLETIONS

    def server(self) -> Server:
        settings = self.settings
        arguments = ["--dtype", settings.dtype, "--max-running-requests", str(settings.slots)]
        arguments += ["--context-length", str(settings.context_length), "--log-level", "warning"]
        # The time that a request spends in the queue is part of the metrics.
        arguments += ["--enable-metrics"]
        if settings.on_gpu:
            arguments += ["--mem-fraction-static", "0.5"]
        else:
            tokens = max(16384, settings.slots * settings.context_length)
            arguments += ["--device", "cpu", "--max-total-tokens", str(tokens)]
        environment = {} if settings.on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
        return Server(
            settings.model,
            [*arguments, *self.speculation],
            cores=self.cores,
            environment=environment,
        )


def configuration(name: str, settings: Settings) -> Configuration:
    """The configuration `name`, one of NAMES.

    On a CPU the target has one core and the sidecar another, and `none-equal` has both; with a
    single core there is nothing to divide. On a GPU all of them share the first one, so that
    `none-equal` is `none` again.
    """
    target, sidecar = split_cores(settings.on_gpu)
    speculation: list[str] = []
    if name == "ngram":
        speculation = ["--speculative-algorithm", "NGRAM"]
    elif name == "lookup":
        speculation = ["--speculative-algorithm", "QSPEC"]
    elif name in COMPLETIONS:
        speculation = ["--speculative-algorithm", "QSPEC"]
        speculation += ["--speculative-draft-model-path", str(settings.draft_model)]
        speculation += ["--speculative-qspec-completions", str(COMPLETIONS[name])]
        if settings.on_gpu:
            speculation += ["--speculative-qspec-device", "cuda:0"]
        elif sidecar:
            speculation += ["--speculative-qspec-cores", ",".join(map(str, sidecar))]
    cores = (*target, *sidecar) if name == BASELINE_ALL_CORES else target
    return Configuration(name, settings, tuple(speculation), cores)


def used_cores(settings: Settings) -> dict[str, list[int]]:
    """The processors of target and sidecar, for the report."""
    target, sidecar = split_cores(settings.on_gpu)
    everywhere = sorted(os.sched_getaffinity(0))
    return {"target": list(target) or everywhere, "sidecar": list(sidecar) or everywhere}
