"""Clears what an earlier LoRA adapter left in a slot of SGLang's pool.

SGLang 0.5.23 writes an adapter's embedding and LM head into its slot. If a new adapter has none,
those of the evicted adapter stay in the slot and change the answers of the new adapter.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config


def clear(pool: Any, uid: str | None, buffer_id: int, *args: Any, **given: Any) -> None:
    """Before `LoRAMemoryPool.load_lora_weight_to_buffer`: clear embedding and LM head of a slot."""
    if not config.is_qspec(get_spec()):
        return
    for buffers in (
        pool.embedding_A_buffer,
        pool.embedding_B_buffer,
        pool.lm_head_A_buffer,
        pool.lm_head_B_buffer,
    ):
        for buffer in buffers.values():
            buffer[buffer_id].zero_()
