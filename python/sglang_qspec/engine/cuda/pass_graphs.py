"""Owns an attention backend and CUDA graphs for each width of the target's passes.

A backend keeps the buffers that its graphs read, and some backends also take their width from the
configuration. So each width has a backend of its own. Before a pass the target's model runner gets
the backend and the graphs of that width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils import get_available_gpu_memory

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.cuda import backends, capture, widths
from sglang_qspec.policy import LADDER, PASS_ROWS

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True)
class _Passes:
    """The attention backend and the CUDA graphs of the passes of one width."""

    backend: Any
    """SGLang's attention backend."""
    runner: Any | None
    """SGLang's runner of CUDA graphs; None for eager passes."""

    def captures(self, requests: int) -> bool:
        """Whether a graph can run a batch of this size; the graph pads smaller batches."""
        return self.runner is not None and requests <= self.runner.max_bs


class PassGraphs:
    """Chooses the backend and the graphs of each pass of one target.

    It is empty before `capture`. It stays empty if there are no graphs and one backend takes every
    width. While it is empty, every pass runs on the backend and the graphs that SGLang has made.
    """

    def __init__(self, model_runner: Any, settings: QSpecConfig) -> None:
        self._model_runner = model_runner
        self._settings = settings
        self._passes: dict[int, _Passes] = {}
        self.tiers: tuple[int, ...] = ()
        """Total numbers of tokens for which ragged passes are captured, in rising order; empty for
        trees and for eager passes."""

    def capture(self) -> None:
        """Make the backends, and capture the graphs. Call it after SGLang has captured its own."""
        model_runner = self._model_runner
        runner = model_runner.decode_cuda_graph_runner
        graphs = runner is not None and runner is not model_runner.eager_runner
        own = _Passes(model_runner.attn_backend, runner if graphs else None)
        widest: int = get_spec().speculative_num_draft_tokens
        ragged = backends.is_ragged()
        if own.runner is None:
            if not ragged and not self._attention.any_width:
                self._passes = {1: own, widest: own}
                for width in LADDER:
                    if 1 < width < widest:
                        self._passes[width] = self._make(width)
            return
        if ragged:
            self.tiers = tuple(own.runner.capture_num_tokens)
        else:
            self._passes[widest] = own
        wanted = (1,) if ragged else widths.to_capture(self._settings.graph_widths, widest)
        self._capture_all([width for width in wanted if width not in self._passes])

    def widths(self, requests: int) -> tuple[int, ...] | None:
        """Widths that a pass over `requests` may have, in rising order; None for all widths.

        A width is allowed if its graphs can run a batch of this size. If no width has such graphs,
        every width with at most PASS_ROWS rows is allowed, and the pass runs eagerly on the backend
        of that width. A plain pass is always allowed.
        """
        if not self._passes:
            return None
        captured = [width for width, made in self._passes.items() if made.captures(requests)]
        eager = [width for width in self._passes if width * requests <= PASS_ROWS]
        return tuple(sorted({1, *(captured or eager)}))

    def at(self, width: int) -> AbstractContextManager[None]:
        """A context that runs the target's passes on the backend and the graphs of `width`.

        Ragged passes run on the backend and the graphs that SGLang has made for the widest pass.
        """
        made = self._passes.get(width)
        return nullcontext() if made is None else self._using(made)

    @property
    def _backend(self) -> str:
        """Name of the attention backend that verifies."""
        runner = self._model_runner
        prefill = get_spec().speculative_attention_mode == "prefill"
        chosen = (
            runner.prefill_attention_backend_str if prefill else runner.decode_attention_backend_str
        )
        return str(chosen)

    @property
    def _attention(self) -> backends.BackendAbilities:
        return backends.attention_of(self._backend)

    def _capture_all(self, wanted: list[int]) -> None:
        """Capture the `wanted` widths in rising order, but no width that needs too much memory."""
        began, free = time.monotonic(), self._free_mib()
        limit = min(float(self._settings.graph_memory), free / 2)
        left_out = []
        for width in wanted:
            used = free - self._free_mib()
            if used + self._estimate_mib(width) > limit:
                left_out.append(width)
                continue
            self._passes[width] = self._make(width, graphs=True)
        logger.info(
            "Target passes run in CUDA graphs: %s. QSPEC's own graphs took %.1f s and %.0f MiB.",
            self._describe(),
            time.monotonic() - began,
            free - self._free_mib(),
        )
        if left_out:
            logger.warning(
                "No CUDA graphs for width %s: they would take more than %.0f MiB. %s"
                "Raise --speculative-qspec-graph-memory, or lower --mem-fraction-static.",
                ", ".join(map(str, left_out)),
                limit,
                "Passes without drafts are eager and slower. " if 1 in left_out else "",
            )

    def _describe(self) -> str:
        """The captured widths and batch sizes, for the log."""
        runners = {width: made.runner for width, made in sorted(self._passes.items())}
        parts = [
            f"width {width} for {len(runner.capture_bs)} batch sizes up to {runner.max_bs}"
            for width, runner in runners.items()
            if runner is not None
        ]
        if self.tiers:
            parts.append(f"ragged for {len(self.tiers)} totals up to {self.tiers[-1]} tokens")
        return ", ".join(parts)

    def _estimate_mib(self, width: int) -> float:
        """Memory that the backend and the graphs of a width will take, in MiB."""
        runner = self._model_runner
        config = runner.model_config
        with widths.pruned(width) as sizes:
            requests = min(max(sizes), runner.req_to_token_pool.size)
        shape = widths.Shape(
            requests=requests,
            context_len=config.context_len,
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
        )
        taken = widths.buffer_bytes(self._backend, shape, width)
        return (taken + len(sizes) * widths.graph_bytes(self._backend)) / MIB

    def _free_mib(self) -> float:
        """Free memory of the fullest GPU of the target, so that all ranks capture equal widths."""
        runner, group = self._model_runner, get_parallel().tp_group
        gib: float = get_available_gpu_memory(
            runner.device,
            runner.gpu_id,
            distributed=group.world_size > 1,
            cpu_group=group.cpu_group if group.world_size > 1 else None,
        )
        return gib * 1024

    def _make(self, width: int, *, graphs: bool = False) -> _Passes:
        """A new backend for `width`; with `graphs` also its CUDA graphs."""
        runner = self._model_runner
        branches = 1 if backends.are_chains() else backends.branching(width)
        with get_spec().override(
            speculative_num_draft_tokens=width, speculative_eagle_topk=branches
        ):
            # All passes of a runner use one stream, so their backends can share one workspace.
            backend = runner._get_attention_backend()
            runner.kv_index_translator.bind_and_verify_backends([backend])
            if not graphs:
                return _Passes(backend, None)
            with self._using(_Passes(backend, None)):
                return _Passes(backend, capture.capture_width(runner, backend, width))

    @contextmanager
    def _using(self, made: _Passes) -> Iterator[None]:
        runner = self._model_runner
        kept = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = made.backend, made.runner
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = kept
