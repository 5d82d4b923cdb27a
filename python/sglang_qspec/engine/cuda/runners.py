"""SGLang's runner of decode CUDA graphs, for plain passes, trees of one width and ragged chains.

SGLang makes one runner, which captures TARGET_VERIFY at the width of
`--speculative-num-draft-tokens`. These graphs cannot run a plain decode pass. `PlainGraphs`
captures DECODE passes, and `TreeGraphs` captures verify passes of other widths. In SGLang's
RAGGED_VERIFY_MODE `compact`, graphs are keyed by the total number of tokens. In this mode SGLang's
code for NGRAM gives a capture no layout, so `RaggedGraphs` adds the layout.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec

from sglang_qspec.engine.cuda import widths


class PlainGraphs(DecodeCudaGraphRunner):
    """Graphs of DECODE passes, which have one token for each request and no draft."""

    @property
    def capture_forward_mode(self) -> Any:
        """DECODE; SGLang would set TARGET_VERIFY, as for every speculative algorithm."""
        return ForwardMode.DECODE

    @capture_forward_mode.setter
    def capture_forward_mode(self, mode: Any) -> None:
        pass

    def get_spec_info(self, num_tokens: int) -> None:
        """None, because backends take a decode pass with drafts for a pass of a draft model."""


class TreeGraphs(DecodeCudaGraphRunner):
    """Graphs of verify passes with trees of one width, at the batch sizes of `widths`."""

    def __init__(self, model_runner: Any, **options: Any) -> None:
        width = options.get("speculative_num_draft_tokens")
        with widths.pruned(width or get_spec().speculative_num_draft_tokens):
            super().__init__(model_runner, **options)


class RaggedGraphs(DecodeCudaGraphRunner):
    """Graphs of ragged verify passes, keyed by their total number of tokens (their tier)."""

    capture_bs: list[int]

    def get_spec_info(self, num_tokens: int) -> Any:
        """The dummy input of a capture, with the layout that the kernels read at replay."""
        spec_info = super().get_spec_info(num_tokens)
        spec_info.ragged_verify_layout = self._capture_ragged_verify_layout(num_tokens)
        return spec_info

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        """The tiers. SGLang has already set `max_bs`, so graphs keep slots for large batches."""
        self.capture_bs = widths.batch_sizes(self.capture_bs, self.captured_req_width)
        tiers: list[int] = super()._build_ragged_verify_token_buckets()
        return tiers
