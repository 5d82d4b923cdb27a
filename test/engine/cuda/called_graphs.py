"""Runs SGLang's runner of decode CUDA graphs on a CPU, with a function call as the replay.

SGLang's own code captures, pads batches, fills its static buffers and reads the one buffer of
logits. Only the graph itself differs. The attention backends of this module are strict, like the
backends of a GPU: a backend has one width, and only the runner of this width may set it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.runtime_context import get_spec

from sglang_qspec.engine.cpu.attention import NAME, CpuAttention


class OneWidth(CpuAttention):
    """Attention on a CPU, for the width of the configuration in which it was made.

    As in fa3, ragged passes take chains and ignore masks.
    """

    supports_ragged_verify_graph = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.width: int = get_spec().speculative_num_draft_tokens
        self._requests: int | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        assert self._requests is None, "a second runner would replace what the first one's read"
        self._requests = max_bs

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._check(forward_batch)
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Set up as a replay does: the mask covers the real requests, and the others get ones."""
        self._check(forward_batch)
        spec_info, view = forward_batch.spec_info, SimpleNamespace(**vars(forward_batch))
        layout = None if spec_info is None else spec_info.ragged_verify_layout
        if layout is not None:
            lens = layout.padded_to_bucket(padded_bs=view.batch_size).verify_lens
            assert len(view.out_cache_loc) == int(lens.sum())
            some = lens > 0  # not all of the padded requests have a row
            view.forward_mode, view.seq_lens = ForwardMode.EXTEND, (view.seq_lens + lens)[some]
            view.req_pool_indices = view.req_pool_indices[some]
            view.extend_seq_lens, view.extend_seq_lens_cpu = lens[some], lens[some].tolist()
            super().init_forward_metadata(view)
            return
        if spec_info is not None:
            cells = forward_batch.batch_size * self.width**2
            mask = torch.ones(cells, dtype=torch.bool)
            given = spec_info.custom_mask[:cells]
            mask[: len(given)] = given
            view.spec_info = SimpleNamespace(
                custom_mask=mask, draft_token_num=self.width, ragged_verify_layout=None
            )
        # The static buffers, as kernels would read them; `out_cache_loc` is padded there.
        super().init_forward_metadata(_Padded(view, self.width))

    def _check(self, forward_batch: Any) -> None:
        spec_info = forward_batch.spec_info
        if spec_info is not None and spec_info.ragged_verify_layout is None:
            assert spec_info.draft_token_num == self.width, "another backend's width"


class _Padded(SimpleNamespace):
    """A batch of static buffers; slot 0 is for padding."""

    def __init__(self, view: Any, width: int) -> None:
        super().__init__(**vars(view))
        rows = view.batch_size * (width if view.spec_info is not None else 1)
        slots = torch.zeros(rows, dtype=torch.int64)
        given = view.out_cache_loc[:rows]
        slots[: len(given)] = given
        self.out_cache_loc = slots


class CalledGraphs:
    """The part of SGLang's CUDA graph backends that a runner uses."""

    def __init__(self, runner: Any, **options: Any) -> None:
        self._runner = runner
        self._calls: dict[Any, Callable[[], Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], **options: Any) -> None:
        forward_fn()
        self._calls[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._calls

    def replay(self, shape_key: Any, static_forward_batch: Any, **options: Any) -> Any:
        """Overwrite the logits of the last pass, as a graph does, and compute those of this one."""
        self._runner.buffers.next_token_logits_buffer.fill_(float("nan"))
        return self._calls[shape_key]()


@contextmanager
def _no_stream(stream: Any) -> Iterator[Any]:
    yield SimpleNamespace(stream=stream)


def _capture(*, model_runner: Any) -> Any:
    """Capture as SGLang's `capture_decode_graph` does on a GPU."""
    return cuda_graph_setup.GraphCapture(
        runner=model_runner._decode_cuda_graph_runner_cls()(model_runner),
        memory_phase="target_verify",
        memory_usage_gb=0,
        capture_time=0,
    )


def install() -> None:
    """Let this process capture and replay decode graphs on its CPU."""
    ATTENTION_BACKENDS[NAME] = OneWidth
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    cuda_graph_setup.capture_decode_graph = _capture
    decode_cuda_graph_runner.resolve_decode_backend = CalledGraphs
    decode_cuda_graph_runner.graph_capture = _no_stream
    decode_cuda_graph_runner.get_or_create_global_graph_capture_stream = lambda: None
