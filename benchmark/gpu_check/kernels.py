"""Checks kernels and tensor code on the device against the results of a CPU.

On a CPU (`--emulate`) Triton's interpreter runs the Triton kernel, which needs TRITON_INTERPRET=1
from the start of the process. All other code takes the path of a GPU where CPU and GPU differ.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch

from benchmark.gpu_check import draws, stand_ins, trees
from benchmark.gpu_check.outcome import Options, Steps
from sglang_qspec.verify import rows

CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "gumbel": draws.gumbel,
    "likeliest": draws.likeliest_tokens,
    "filters": draws.filters,
    "penalties": draws.penalties,
    "inverse": draws.inverse,
    "rejection": draws.rejection,
    "sidecar_sampling": draws.sidecar_sampling,
    "staging": trees.staging,
    "verify_input": trees.verify_input,
    "accept": trees.accept,
    "tree_links": trees.links,
    "kv_rows": trees.kv_rows,
    "stand_ins": stand_ins.compare,
}
"""Each check raises AssertionError if the device disagrees with the CPU, and may return a note."""


def kernels(options: Options, steps: Steps) -> None:
    device = torch.device(options.device)
    picks = rows.picks
    with mock.patch.object(rows, "picks", picks if options.on_gpu else lambda _mask: False):
        for name, check in CHECKS.items():
            with steps.check(name):
                if note := check(device):
                    steps.found.figures[name] = note
