"""Registers QSPEC with SGLang as a speculative algorithm that behaves like NGRAM.

SGLang asks an algorithm which built-in algorithm it resembles (`is_ngram`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_qspec.config import ALGORITHM
from sglang_qspec.engine.passes.launch.future_map import LastTokens
from sglang_qspec.engine.start import arguments


class QSpecAlgorithm(CustomSpecAlgo):
    """Verifies trees on SGLang's path for NGRAM; the server has no draft KV."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def supports_ragged_verify(self) -> bool:
        """True; `engine.cuda.backends.prepare` chooses the mode."""
        return True

    def handle_server_args(self, server_args: Any) -> None:
        arguments.apply_defaults(server_args)

    # SGLang 0.5.23 calls these methods, but its CustomSpecAlgo lacks them.

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> LastTokens:
        return LastTokens(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None


def register() -> None:
    """Register the name `QSPEC` for `--speculative-algorithm`."""
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=QSpecAlgorithm)(
        _worker_class
    )


def _worker_class(server_args: Any) -> type:
    # Only scheduler processes call this; the worker imports the model executor.
    from sglang_qspec.engine.passes.worker import QSpecWorker

    return QSpecWorker
