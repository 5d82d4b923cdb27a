"""The tensors that a pass leaves on the device for the next pass, as SGLang's NGRAM worker does.

With the overlap scheduler SGLang keeps the accepted tokens of each request in a buffer on the
device (`FutureMap`). The first result sets the width of this buffer, so every result is padded to
the width of the widest pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def carried(accept_lens: Tensor, seq_lens: Tensor) -> NgramVerifyInput:
    """The relay without overlap, which SGLang filters and merges. It reads only the lengths."""
    return NgramVerifyInput(
        draft_token_num=1,
        new_seq_lens=seq_lens,
        accept_tokens=torch.zeros_like(accept_lens, dtype=torch.int32),
        accept_lens=accept_lens,
    )


def relayed(
    token_ids: Tensor, accept_lens: Tensor, seq_lens: Tensor, widest: int
) -> NgramVerifyInput:
    """The relay with overlap, which SGLang hands to the next pass.

    `token_ids` has one row for each request. The first `accept_lens` int32 [bs] tokens of a row are
    output tokens. `seq_lens` are the new lengths, and `widest` is the width of the widest pass.
    """
    columns = token_ids.numel() // max(1, len(accept_lens))
    rows = token_ids.view(len(accept_lens), columns)
    padded = torch.nn.functional.pad(rows, (0, widest - columns))
    return NgramVerifyInput(
        draft_token_num=widest,
        new_seq_lens=seq_lens,
        accept_tokens=padded.to(torch.int32).flatten(),
        accept_lens=accept_lens,
    )


def last_ids(batch: ScheduleBatch) -> Tensor:
    """The last output token of each request, from the relays of the last passes: int64 [bs]."""
    relay = batch.spec_info
    rows = relay.accept_tokens.view(len(relay.accept_lens), -1)
    last: Tensor = rows.gather(1, relay.accept_lens.long().unsqueeze(1) - 1).flatten()
    return last.long()
