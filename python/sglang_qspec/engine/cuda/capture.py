"""Which class captures the target's CUDA graphs, and at which batch sizes.

SGLang reads the batch sizes of a capture from its configuration, so a capture runs with a pruned
copy of the configuration. The runner classes are imported only for a capture, so a CPU server does
not import them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_exec, get_spec

from sglang_qspec.config import ALGORITHM
from sglang_qspec.engine.cuda import backends, widths
from sglang_qspec.policy import PASS_ROWS


def runner_class(target: Callable[[Any], type], model_runner: Any) -> type:
    """Around `ModelRunner._decode_cuda_graph_runner_cls`: the class for the target of QSPEC."""
    if not _is_target(model_runner):
        return target(model_runner)
    from sglang_qspec.engine.cuda import runners

    return runners.RaggedGraphs if backends.is_ragged() else runners.TreeGraphs


def logits_rows(target: Callable[[Any], int], model_runner: Any) -> int:
    """Around `ModelRunner.max_decode_logits_rows`: the most rows of logits of a captured pass."""
    rows = target(model_runner)
    if not _is_target(model_runner):
        return rows
    with widths.pruned(get_spec().speculative_num_draft_tokens):
        verified = target(model_runner)
    return max(verified, min(rows, PASS_ROWS), max(get_exec().graph.cuda_graph_config.decode.bs))


def capture_width(model_runner: Any, backend: Any, width: int) -> Any:
    """Capture the graphs of `width` on its own attention `backend`; width 1 is plain decoding."""
    from sglang_qspec.engine.cuda import runners

    made = runners.PlainGraphs if width == 1 else runners.TreeGraphs
    return made(model_runner, attn_backend=backend, speculative_num_draft_tokens=width)


def _is_target(model_runner: Any) -> bool:
    """Whether the runner runs a target with QSPEC; the sidecar's runner has no speculation."""
    return bool(model_runner.spec_algorithm.name == ALGORITHM)
