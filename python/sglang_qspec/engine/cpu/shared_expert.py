"""Computes the gate of a shared expert in torch, where SGLang launches a Triton kernel.

Qwen2-MoE and the families that share its block call the kernel on a CPU too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.kernels.ops.elementwise import elementwise

if TYPE_CHECKING:
    from torch import Tensor


def _gate(
    hidden_states: Tensor,
    gate_weight: Tensor,
    shared_output: Tensor,
    output: Tensor,
    *,
    do_add: bool,
) -> None:
    """Write `shared_output` [n, m] times its gate to `output`, or add it to `output`.

    The gate of a row is the sigmoid of `hidden_states` [n, m] times `gate_weight` [m], in float32.
    """
    gates = (hidden_states.float() * gate_weight.float()).sum(1, keepdim=True).sigmoid()
    gated = gates * shared_output.float()
    output.copy_(gated + output.float() if do_add else gated)


def install() -> None:
    """Replace the launch of SGLang's kernel; repeated calls have no further effect."""
    elementwise._launch_fused_gate_sigmoid_mul = _gate
