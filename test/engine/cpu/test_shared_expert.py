"""The gate of a shared expert in torch equals its definition, which SGLang's Triton kernel has."""

from __future__ import annotations

import torch
from sglang.kernels.ops.elementwise.elementwise import (
    fused_gate_sigmoid_mul,
    fused_gate_sigmoid_mul_add,
)

from sglang_qspec.engine.cpu import shared_expert


def test_the_gated_output_of_a_shared_expert_is_made_and_added() -> None:
    shared_expert.install()
    hidden, shared, routed = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(64, generator=torch.Generator().manual_seed(1))
    expected = torch.sigmoid(hidden @ weight)[:, None] * shared
    torch.testing.assert_close(fused_gate_sigmoid_mul(hidden, weight, shared), expected)
    total = routed.clone()
    fused_gate_sigmoid_mul_add(hidden, weight, shared, total)
    torch.testing.assert_close(total, routed + expected)
