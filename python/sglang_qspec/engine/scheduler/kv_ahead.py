"""Reserves KV slots once for several passes without drafts.

Before each decode pass SGLang gives each request slots for two of the longest passes: for the last
one, whose tokens it has not counted, and for the next one. A pass without drafts takes one slot of
each request. So behind such passes over the same requests the slots last for further passes, and
SGLang need not go through the requests before each of them. With the overlap scheduler only early
passes count, since SGLang prepares a pass before it knows what kind the last one was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode


class _Reserve:
    """The slots of the batch of the last reservation, counted in passes."""

    def __init__(self) -> None:
        self.passes = 0
        """Number of further passes that need no reservation."""
        self._reqs: Sequence[Any] = ()

    def covers(self, batch: Any) -> bool:
        """Whether the next pass over `batch` needs no slots, even if it has drafts.

        Where SGLang counts the tokens of penalties before a pass, it prepares each pass itself.
        """
        return (
            self.passes > 0
            and batch.reqs == self._reqs
            and not batch.sampling_info.penalizer_orchestrator.is_required
        )

    def renew(self, reqs: Sequence[Any]) -> None:
        """Note that SGLang has reserved slots for `reqs`.

        With n slots for the longest pass, 2n are reserved. The last pass may have taken one of
        them, and n stay for the next pass.
        """
        self._reqs, self.passes = list(reqs), get_alloc_reserve_per_decode() // 2 - 1


_reserve = _Reserve()
"""The reserve of the process's scheduler."""


def note_pass(*, one_slot: bool) -> None:
    """Note whether a pass takes one slot of each request, so that the reserve still counts."""
    if not one_slot:
        _reserve.passes = 0


def tokens_required(
    target: Callable[..., int], batch: Any, selected_indices: list[int] | None = None
) -> int:
    """Around `ScheduleBatch.new_tokens_required_next_decode`: slots that the next pass needs."""
    if selected_indices is None and _reserve.covers(batch):
        return 0
    return target(batch, selected_indices)


def prepare(target: Callable[[Any], None], batch: Any) -> None:
    """Around `eagle_prepare_for_decode`: reserve slots unless the reserve lasts."""
    if not _reserve.covers(batch):
        target(batch)
        _reserve.renew(batch.reqs)
        return
    _reserve.passes -= 1
    batch.maybe_evict_swa()
    for req in batch.reqs:
        req.decode_batch_idx += 1
