"""The server that the user wants, and what the checks have found out about it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement.environment import Placement

if TYPE_CHECKING:
    from sglang_qspec.engine.sidecar.model_pair import ModelDescription

DEFAULT_PORT = 30000
"""SGLang's default of --port."""


@dataclass
class Case:
    """Options of `qspec doctor`, and results that later checks and the command line need.

    A result is None until its check has succeeded.
    """

    model: str | None = None
    draft_model: str | None = None
    device: str = ""
    """`cpu`, `cuda`, `cuda:N`, or empty for SGLang's choice."""
    port: int = DEFAULT_PORT
    measure: bool = False

    cpu_engine: bool = False
    """Whether SGLANG_USE_CPU_ENGINE was set when the doctor began."""
    settings: QSpecConfig | None = None
    kind: str | None = None
    """`cpu` or `cuda`: the kind of the target's device."""
    sglang: bool = False
    """Whether SGLang and QSPEC's plugin work."""
    target: ModelDescription | None = None
    draft: ModelDescription | None = None
    tokenizers_fit: bool = False
    arguments: Any = None
    """SGLang's arguments after the checks of a start."""
    placement: Placement | None = None
    """Where the server's own sidecar runs."""
    drafts_pay: bool = True
    """False if a measurement predicts no gain from the draft model."""
    expectation: str | None = None
    """A paragraph on what to expect; None without a measurement."""
    measured: dict[str, Any] | None = None
    """The figures of a measurement, as in the output of `--json`."""

    @property
    def index(self) -> int:
        """Number of the target's GPU."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def draft_kind(self) -> str | None:
        """`cpu` or `cuda`: the kind of the sidecar's device, if the server starts a sidecar."""
        if self.draft_model is None or self.settings is None or self.kind is None:
            return None
        return self.settings.draft_device.partition(":")[0] or self.kind

    @property
    def sidecar_cpus(self) -> str:
        """CPUs that the target leaves to the sidecar; empty if it does not divide its CPUs."""
        from sglang_qspec.engine.placement.core_division import left_cpus, sidecar_cpus

        if self.settings is None or not self.kind == self.draft_kind == "cpu":
            return ""
        return sidecar_cpus(self.settings) or left_cpus(self.settings)

    def server_arguments(self) -> dict[str, Any]:
        """The fields of SGLang's ServerArgs that the recommended command sets."""
        given: dict[str, Any] = {"model_path": self.model, "speculative_algorithm": "QSPEC"}
        if self.draft_model is not None and self.drafts_pay:
            given["speculative_draft_model_path"] = self.draft_model
        if self.index:
            given["base_gpu_id"] = self.index
        if self.port != DEFAULT_PORT:
            given["port"] = self.port
        return given

    def command(self) -> str | None:
        """A command that starts the server; None without a target."""
        if self.model is None:
            return None
        words = ["python", "-m", "sglang.launch_server"]
        for name, value in self.server_arguments().items():
            words += ["--" + name.replace("_", "-"), str(value)]
        variables = "SGLANG_USE_CPU_ENGINE=1 " if self.kind == "cpu" else ""
        return variables + shlex.join(words)
