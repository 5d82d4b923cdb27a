"""A supervised sidecar with a clock of its own; the program is a stand-in."""

import time
from collections.abc import Callable

from sglang_qspec.config import QSpecConfig
from sglang_qspec.sidecar.child_process import SidecarProcess


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def sidecar_on(device: str, clock: Clock, visible: str | None = None) -> SidecarProcess:
    """A sidecar that has not started, with a model that does not exist."""
    return SidecarProcess(
        QSpecConfig(),
        model_path="m",
        quantization=None,
        endpoint="ipc:///nowhere",
        device=device,
        visible=visible,
        clock=clock,
    )


def until(happened: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until it has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
