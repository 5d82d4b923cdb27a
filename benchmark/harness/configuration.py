"""The flags of a measured server: the flags that all servers of a benchmark share, and its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from benchmark.harness import standin
from benchmark.harness.server import Server

SIDECAR_FLAGS = ("--speculative-draft-model-path", "--speculative-qspec-endpoint")
"""Flags that give a server a sidecar."""


@dataclass(frozen=True)
class Settings:
    """The settings that all servers of a benchmark share."""

    model: Path
    draft_model: Path
    dtype: str
    """Dtype of the target."""
    slots: int
    """Maximum number of requests that run at once."""
    context_length: int
    """Maximum tokens of a request, prompt and output together."""
    on_gpu: bool
    target_cores: tuple[int, ...] = ()
    """Processors of the target; empty if it is not pinned."""
    sidecar_cores: tuple[int, ...] = ()
    """Processors of the sidecar; empty if it is not pinned."""
    total_tokens: int | None = None
    """KV slots of a CPU server; None gives twice the KV slots of `slots` requests of full length.
    """
    flags: tuple[str, ...] = ()
    """More flags of all servers; they override the flags of the fields above."""

    @property
    def all_cores(self) -> tuple[int, ...]:
        """Processors of target and sidecar together."""
        return (*self.target_cores, *self.sidecar_cores)

    @property
    def shown(self) -> dict[str, str]:
        """The settings by name, for headers and results."""
        given = asdict(self)
        if not self.flags:  # such a header equals one that has no `flags`, so the run can resume
            del given["flags"]
        return {name: str(value) for name, value in given.items()}

    @property
    def has_stand_ins(self) -> bool:
        """Whether torch stands in for SGLang's kernels, which do not take float32 on a GPU."""
        return self.on_gpu and self.dtype == "float32"

    def arguments(self) -> list[str]:
        """The server flags."""
        # SGLang reports the times in the queue and of the prefill only with metrics.
        found = ["--dtype", self.dtype, "--log-level", "warning", "--enable-metrics"]
        found += ["--max-running-requests", str(self.slots)]
        found += ["--context-length", str(self.context_length)]
        if self.on_gpu:
            found += ["--mem-fraction-static", "0.5"]
            if self.has_stand_ins:
                found += standin.FLAGS
        else:
            tokens = self.total_tokens or max(8192, 2 * self.slots * self.context_length)
            found += ["--device", "cpu", "--max-total-tokens", str(tokens)]
        return [*found, *self.flags]

    def qspec(self, *flags: str, mem_fraction: float | None = None) -> tuple[str, ...]:
        """The server flags of QSPEC with a sidecar, followed by `flags`.

        `mem_fraction` is the sidecar's share of a CPU's memory, which is small because each waiting
        server has a sidecar; None for the default. On a GPU the sidecar shares the target's GPU.
        """
        found = ["--speculative-algorithm", "QSPEC"]
        found += ["--speculative-draft-model-path", str(self.draft_model)]
        if self.on_gpu:
            found += ["--speculative-qspec-draft-device", "cuda:0"]
        elif mem_fraction is not None:
            found += ["--speculative-qspec-mem-fraction", str(mem_fraction)]
        if self.sidecar_cores:
            found += ["--speculative-qspec-cores", ",".join(map(str, self.sidecar_cores))]
        return (*found, *flags)


@dataclass(frozen=True)
class Configuration:
    """A way to serve requests: flags and cores of a server, and `custom_params` of requests.

    Configurations with the same `server_key` share a server.
    """

    name: str
    settings: Settings
    flags: tuple[str, ...] = ()
    """Server flags besides those of the settings; the last one counts if a flag comes twice."""
    cores: tuple[int, ...] = ()
    """Processors of the target."""
    custom_params: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """`custom_params` of each request."""

    @property
    def has_sidecar(self) -> bool:
        return any(flag in self.flags for flag in SIDECAR_FLAGS)

    @property
    def server_key(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.flags, self.cores

    def server(
        self,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> Server:
        """A server that is not started yet; `environment` is added to that of this process."""
        engine = {} if self.settings.on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
        arguments = [*self.settings.arguments(), *self.flags]
        replaced = standin.environment() if self.settings.has_stand_ins else {}
        added = {**engine, **replaced, **(environment or {})}
        place = (self.settings.model, arguments)
        return Server(
            *place,
            cores=self.cores,
            pinned_from_start=True,
            environment=added,
            launcher=launcher,
        )


def with_and_without(settings: Settings, *flags: str) -> tuple[Configuration, Configuration]:
    """No speculation, and QSPEC with its `flags`."""
    return (
        Configuration("no speculation", settings, (), settings.target_cores),
        Configuration("QSPEC", settings, settings.qspec(*flags), settings.target_cores),
    )
