"""SGLang's relay between passes, which relays one token of each request.

SGLang reads the lengths of the texts from the device before it launches a pass, and so waits for
the end of the last pass (`FutureMap.resolve_seq_lens_cpu`). After a pass without drafts the host
knows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload

from sglang_qspec.engine.passes.lineup import KnownLens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class LastTokens(FutureMap):
    """SGLang's `FutureMap` with the last token of each text instead of all tokens of a pass.

    It does not wait for the device if the host knows the lengths.
    """

    known: KnownLens | None = None
    """What the host knows of the next batch, until `resolve_seq_lens_cpu` takes it. None if only
    the device knows the lengths."""
    _in_place = False
    """`KnownLens.in_place` of the batch of the last call of `resolve_seq_lens_cpu`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._unwritten: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Buffers, with the rows and the values that they lack. A pass in place leaves them, since
        the next pass reads none if it is in place too."""

    def resolve_seq_lens_cpu(self, batch: ScheduleBatch, stream_ordered: bool = False) -> None:
        """Set the lengths of the batch on the device and on the host."""
        known, self.known = self.known, None
        self._in_place = known is not None and known.in_place
        if not self._in_place:
            self._write()
        if known is None:
            super().resolve_seq_lens_cpu(batch, stream_ordered)
            return
        # The device still has to wait for the pass that computes its copy of the lengths.
        if self.publish_ready is not None and not stream_ordered:
            self.publish_ready.wait()
        self._publish_fresh = False
        relay = batch.spec_info
        batch.seq_lens = (
            relay.new_seq_lens if known.in_place else self.new_seq_lens_buf[relay.future_indices]
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = known.seq_lens, known.total

    def publish(
        self,
        future_indices: torch.Tensor,
        new_seq_lens: torch.Tensor,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Keep the lengths after a pass over the requests in the slots `future_indices`."""
        if not self._in_place:
            super().publish(future_indices, new_seq_lens, confidence)
            return
        self._unwritten = [(self.new_seq_lens_buf, future_indices, new_seq_lens)]
        self.publish_ready.record()
        self._publish_fresh = True

    def stash(self, future_indices: torch.Tensor, payload: RelayPayload) -> None:
        """Keep the last tokens of a pass over the requests in the slots `future_indices`."""
        assert payload.accept_tokens is not None
        token_ids = payload.accept_tokens.flatten()
        if self._in_place:
            self._unwritten.append((self.output_tokens_buf, future_indices, token_ids))
        else:
            self.output_tokens_buf[future_indices] = token_ids

    def _write(self) -> None:
        """Write what the last passes have left, before a pass that reads or writes the buffers."""
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            self.publish_ready.wait()
            for buffer, rows, values in unwritten:
                buffer[rows] = values
            self.publish_ready.record()

    def _resolve_spec_extras(self, batch: ScheduleBatch) -> None:
        """Give the relay of a batch the last tokens of its texts."""
        relay = batch.spec_info
        if relay is not None and relay.future_indices is not None and not self._in_place:
            relay.accept_tokens = self.output_tokens_buf[relay.future_indices]
