"""A server to measure: what all servers of a run share, and what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from benchmark.harness.server import Server


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
