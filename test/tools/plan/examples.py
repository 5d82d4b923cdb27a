"""Tables with simple times, for tests."""

from __future__ import annotations

from sglang_qspec.tools.measure.tables import Agreement, Draft, Gpus, Prefill, Tables, Verify
from sglang_qspec.tools.plan.trace import Arrival


def flat(
    agreement: Agreement = 0.8,
    *,
    verify: float = 0.04,
    step: float = 0.001,
    prefill: float = 0.0,
    most: int = 64,
    gpus: tuple[int, int] = (1, 1),
    on_gpu: bool = False,
    slowdown: float = 1.0,
) -> Tables:
    """A pass takes `verify` seconds whatever its size, and a draft step `step` seconds."""
    return Tables(
        version=1,
        source="measured",
        machine="a machine",
        target="target",
        draft="draft",
        on_gpu=on_gpu,
        verify=[Verify(b, width, verify) for b in (1, most) for width in (1, 2, 4, 8)],
        prefill=Prefill(prefill, 0.0),
        draft_steps=[Draft(1, step), Draft(most, step)],
        draft_prefill_token=0.0,
        agreement={"step": agreement},
        gpus=Gpus(*gpus),
        slowdown=slowdown,
    )


def batch(requests: int, output: int = 101, prompt: int = 10) -> list[Arrival]:
    """Requests that arrive at once."""
    return [Arrival(0.0, prompt, output)] * requests
