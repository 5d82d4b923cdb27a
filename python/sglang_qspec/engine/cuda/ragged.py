"""Pads ragged verify passes to the totals of tokens for which graphs are captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import msgspec
import torch


def pad(batch: Any, tiers: Sequence[int]) -> None:
    """Pad the packed rows of a ragged pass to the next of the rising `tiers`.

    `batch` has int64 [rows] `input_ids` and `out_cache_loc`; its `spec_info` has int64 [rows]
    `positions` and SGLang's `ragged_verify_layout`. Added rows have token, position and slot 0,
    which no request uses. Passes with more rows than the last tier stay as they are and run
    eagerly, and so do passes with another layout.
    """
    spec_info = batch.spec_info
    layout = None if spec_info is None else spec_info.ragged_verify_layout
    if layout is None:
        return
    rows = len(batch.input_ids)
    place = bisect_left(tiers, rows)
    if place == len(tiers):
        return
    more = tiers[place] - rows
    batch.input_ids = torch.nn.functional.pad(batch.input_ids, (0, more))
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, more))
    spec_info.positions = torch.nn.functional.pad(spec_info.positions, (0, more))
    spec_info.ragged_verify_layout = msgspec.structs.replace(layout, graph_num_tokens=tiers[place])


def cut(logits_output: Any, rows: int) -> None:
    """Drop the logits and the hidden states of the rows that `pad` added behind `rows`."""
    logits_output.next_token_logits = logits_output.next_token_logits[:rows]
    if logits_output.hidden_states is not None:
        logits_output.hidden_states = logits_output.hidden_states[:rows]
