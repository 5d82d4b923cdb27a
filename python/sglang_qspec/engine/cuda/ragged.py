"""Pads ragged verify passes to the total numbers of tokens that have CUDA graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch


def padded(batch: Any, tiers: Sequence[int]) -> AbstractContextManager[None]:
    """A context in which the packed rows of a ragged pass are padded to the next of `tiers`.

    `batch` has int64 [rows] `input_ids` and `out_cache_loc`; its `spec_info` has int64 [rows]
    `positions` and SGLang's `ragged_verify_layout`. `tiers` are in rising order. Added rows have
    token 0, position 0 and slot 0; no request uses slot 0. Passes with more rows than the last tier
    stay as they are and run eagerly. Passes of one width are not padded here, because SGLang's
    runner pads them.
    """
    layout = None if batch.spec_info is None else batch.spec_info.ragged_verify_layout
    place = bisect_left(tiers, len(batch.input_ids))
    if layout is None or place == len(tiers):
        return nullcontext()
    return _padded(batch, layout, tiers[place])


@contextmanager
def _padded(batch: Any, layout: Any, tier: int) -> Iterator[None]:
    spec_info, rows = batch.spec_info, len(batch.input_ids)
    kept = batch.input_ids, batch.out_cache_loc, spec_info.positions
    batch.input_ids, batch.out_cache_loc, spec_info.positions = (
        torch.nn.functional.pad(each, (0, tier - rows)) for each in kept
    )
    spec_info.ragged_verify_layout = msgspec.structs.replace(layout, graph_num_tokens=tier)
    try:
        yield
    finally:
        batch.input_ids, batch.out_cache_loc, spec_info.positions = kept
        spec_info.ragged_verify_layout = layout


def cut(logits_output: Any, rows: int) -> None:
    """Drop the logits and the hidden states of the rows that `padded` added after `rows`."""
    if len(logits_output.next_token_logits) == rows:
        return
    logits_output.next_token_logits = logits_output.next_token_logits[:rows]
    if logits_output.hidden_states is not None:
        logits_output.hidden_states = logits_output.hidden_states[:rows]
