"""The servers that are compared: they differ in speculation and cores, and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from benchmark.server import Server

BASELINE = "none"
BASELINE_ALL_CORES = "none-equal"
LARGEST = "qspec-8"
COMPLETIONS = {"qspec-1": 1, "qspec-2": 2, "qspec-4": 4, LARGEST: 8}
ALL_CORES = {BASELINE: BASELINE_ALL_CORES, "ngram": "ngram-equal", "lookup": "lookup-equal"}
"""What needs no sidecar, and the same on the cores of target and sidecar together."""
NAMES = tuple(name for pair in ALL_CORES.items() for name in pair) + tuple(COMPLETIONS)

_PLAIN = {
    BASELINE: "no speculation",
    "ngram": "SGLang's own NGRAM speculation as it comes",
    "lookup": "QSPEC without a draft model: drafts from a request's prompt and output",
}
DESCRIPTIONS = {
    **{name: f"{text}, on the target's cores" for name, text in _PLAIN.items()},
    **{ALL_CORES[name]: f"{name} on the cores of target and sidecar" for name in _PLAIN},
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
    target_cores: tuple[int, ...] = ()
    """Processors; none if nothing is pinned, as are the sidecar's."""
    sidecar_cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Configuration:
    """How requests are served: a server, and what is asked of it.

    Configurations with the same `server_key` can share a server.
    """

    name: str
    settings: Settings
    speculation: tuple[str, ...]
    cores: tuple[int, ...]
    custom_params: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Of every request, in its sampling parameters."""

    @property
    def has_sidecar(self) -> bool:
        flags = ("--speculative-draft-model-path", "--speculative-qspec-endpoint")
        return any(flag in self.speculation for flag in flags)

    @property
    def server_key(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.speculation, self.cores

    def server(self) -> Server:
        """One that is not started yet."""
        settings = self.settings
        arguments = ["--dtype", settings.dtype, "--max-running-requests", str(settings.slots)]
        arguments += ["--context-length", str(settings.context_length), "--log-level", "warning"]
        # The time that a request spends in the queue is part of the metrics.
        arguments += ["--enable-metrics"]
        if settings.on_gpu:
            arguments += ["--mem-fraction-static", "0.5"]
        else:
            # Room for what runs and as much again of cached prefixes.
            tokens = max(8192, 2 * settings.slots * settings.context_length)
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

    All numbers of completions are served by one server, whose requests ask for theirs. On a GPU
    target and sidecar share the first one.
    """
    both = (*settings.target_cores, *settings.sidecar_cores)
    if name in ALL_CORES.values():
        plain = next(key for key, value in ALL_CORES.items() if value == name)
        return Configuration(name, settings, configuration(plain, settings).speculation, both)
    if name in COMPLETIONS:
        speculation = ["--speculative-algorithm", "QSPEC"]
        speculation += ["--speculative-draft-model-path", str(settings.draft_model)]
        speculation += ["--speculative-qspec-completions", str(COMPLETIONS[LARGEST])]
        if settings.on_gpu:
            speculation += ["--speculative-qspec-draft-device", "cuda:0"]
        else:
            # Several servers wait in memory at once; this is KV for 50 thousand tokens of the demo.
            speculation += ["--speculative-qspec-mem-fraction", "0.06"]
        if settings.sidecar_cores:
            cores = ",".join(map(str, settings.sidecar_cores))
            speculation += ["--speculative-qspec-cores", cores]
        asked = {} if name == LARGEST else {"qspec_completions": COMPLETIONS[name]}
        return Configuration(
            name, settings, tuple(speculation), settings.target_cores, MappingProxyType(asked)
        )
    algorithm = {BASELINE: None, "ngram": "NGRAM", "lookup": "QSPEC"}[name]
    flags = ("--speculative-algorithm", algorithm) if algorithm else ()
    return Configuration(name, settings, flags, settings.target_cores)
