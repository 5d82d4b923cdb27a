"""What a pass leaves on the device for the next pass: the last token of each text, and its length.

SGLang hands it on as the relay of its NGRAM worker, of width 1. With the overlap scheduler it goes
through `future_map`.
"""

from __future__ import annotations

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor


def relayed(token_ids: Tensor, accept_lens: Tensor, seq_lens: Tensor) -> NgramVerifyInput:
    """The relay of a pass over bs requests.

    `token_ids` has one row for each request, of which the first `accept_lens` int32 [bs] are output
    tokens. `seq_lens` int64 [bs] are the new lengths.
    """
    count = len(seq_lens)
    if token_ids.numel() > count:
        rows = token_ids.view(count, -1)
        token_ids = rows.gather(1, accept_lens.long().unsqueeze(1) - 1).flatten()
    return NgramVerifyInput(
        draft_token_num=1,
        new_seq_lens=seq_lens,
        accept_tokens=token_ids.to(torch.int64),
        accept_lens=accept_lens,
    )
