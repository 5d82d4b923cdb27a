"""The GPUs of a server's ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.placement.devices import held_gpus


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, {0}),
        ({"base_gpu_id": 1}, {1}),
        ({"tp_size": 4, "base_gpu_id": 2}, {2, 3, 4, 5}),
        ({"tp_size": 2, "gpu_id_step": 2}, {0, 2}),
        ({"tp_size": 2, "pp_size": 2}, {0, 1, 2, 3}),
        ({"tp_size": 2, "dp_size": 2}, {0, 1, 2, 3}),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, {0, 1, 2, 3}),
        ({"tp_size": 16, "nnodes": 2}, set(range(8))),
    ],
)
def test_the_held_gpus_are_those_of_sglangs_ranks(changes: dict[str, Any], held: set[int]) -> None:
    plain = {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "enable_dp_attention": False,
    }
    assert held_gpus(SimpleNamespace(**{**plain, **changes})) == held
