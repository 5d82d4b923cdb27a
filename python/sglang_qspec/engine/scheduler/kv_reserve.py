"""Widens each request's row of KV slots to hold SGLang's decode reservation.

SGLang reserves two pass widths after the committed tokens, but its rows exceed the context by only
one pass width. Near the end of the context the reservation would reach another request's row, and
would end the server on a CPU. SGLang itself widens the rows for larger pages and for UNO.
"""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_spec

from sglang_qspec import config


def reserve_columns(extra: int) -> int:
    """After `get_req_to_token_extra_context_len`: KV slots of a row beyond the model's context."""
    if not config.is_qspec(get_spec()):
        return extra
    return max(extra, get_alloc_reserve_per_decode())
