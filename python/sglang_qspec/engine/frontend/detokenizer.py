"""Makes each stream equal to the whole answer, in SGLang's detokenizer process.

SGLang decodes the new tokens of each step, and holds back an incomplete character at their end. Its
code is right for steps of one token. After a step of several tokens the text before the incomplete
character may be sent already, and a later step may send it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config
from sglang_qspec.engine.frontend import byte_tokens


def repair_detokenizer(result: None, manager: Any, *args: Any) -> None:
    """After `DetokenizerManager.init_tokenizer`: decode byte tokens by whole characters."""
    if config.is_qspec(get_spec()):
        byte_tokens.repair(manager.tokenizer)


def decode_step(decode: Callable[..., list[str]], manager: Any, batch: Any) -> list[str]:
    """Around `DetokenizerManager._decode_batch_token_id_output`: never forget what has been sent.

    `sent_offset` counts the sent characters of a request. If less of an incomplete step is
    printable than of the step before, SGLang lowers it, and would send the characters again.
    """
    if not config.is_qspec(get_spec()):
        return decode(manager, batch)
    states = manager.decode_status
    sent = {rid: states[rid].sent_offset for rid in batch.rids if rid in states}
    texts = decode(manager, batch)
    for rid, offset in sent.items():
        if rid in states:
            states[rid].sent_offset = max(states[rid].sent_offset, offset)
    return texts
