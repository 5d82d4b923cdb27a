"""How wide a request's row of KV slots is.

SGLang reserves twice the width of a pass behind what is committed, but makes its rows only one pass
wider than the context. Near the context's end the reservation would run into the row of another
request, and end the server on a CPU; SGLang widens the rows itself for larger pages and for UNO.
"""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_spec


def reserve_columns(extra: int) -> int:
    """After `get_req_to_token_extra_context_len`: columns of a row behind the model's context."""
    if get_spec().speculative_algorithm != "QSPEC":
        return extra
    return max(extra, get_alloc_reserve_per_decode())
