"""SGLang's relay between passes, which can take the lengths of texts from the host.

SGLang reads the lengths from the device before it launches a pass, and so waits for the end of the
last pass (`FutureMap.resolve_seq_lens_cpu`). After a pass without drafts the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.overlap_utils import FutureMap

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class KnownLengths(FutureMap):
    """SGLang's `FutureMap`, which does not wait for the device if the host knows the lengths."""

    known: Sequence[int] | None = None
    """Length of each text of the next batch, as SGLang counts it: without the last token. None if
    only the device knows. The next call of `resolve_seq_lens_cpu` takes it."""

    def resolve_seq_lens_cpu(self, batch: ScheduleBatch, stream_ordered: bool = False) -> None:
        """Set the lengths of the batch on the device and on the host."""
        known, self.known = self.known, None
        if known is None:
            super().resolve_seq_lens_cpu(batch, stream_ordered)
            return
        # The device still has to wait for the pass that computes its copy of the lengths.
        if self.publish_ready is not None and not stream_ordered:
            self.publish_ready.wait()
        self._publish_fresh = False
        batch.seq_lens = self.new_seq_lens_buf[batch.spec_info.future_indices]
        batch.seq_lens_cpu = torch.tensor(known, dtype=torch.int64)
        batch.seq_lens_sum = sum(known)
