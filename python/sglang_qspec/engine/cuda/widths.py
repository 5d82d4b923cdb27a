"""Which widths and batch sizes get CUDA graphs, and how much memory their buffers take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sglang.srt.runtime_context import get_exec

from sglang_qspec.policy import PASS_ROWS

AUTO = "auto"
MIDDLE = 3
"""Maximum number of widths between 1 and the widest that `auto` captures."""
GRAPH_BYTES = 2 << 20
"""Memory of one CUDA graph, as SGLang reserves it for a batch size."""
PLAN_BYTES = 8 << 20
"""Memory of the plan that FlashInfer's wrapper keeps on the device. SGLang makes a wrapper for each
graph."""


def to_capture(setting: str, widest: int) -> tuple[int, ...]:
    """Widths that get CUDA graphs, in rising order: always 1 and `widest`.

    `setting` is `auto` (half, a quarter and an eighth of `widest` too) or a list such as `2,4`, of
    which widths above `widest` are left out.
    """
    if setting == AUTO:
        between = [widest >> shift for shift in range(1, MIDDLE + 1)]
    else:
        between = [int(width) for width in setting.split(",")]
    return tuple(sorted({1, widest, *(width for width in between if 1 < width < widest)}))


def batch_sizes(sizes: Sequence[int], width: int) -> list[int]:
    """The batch sizes that are captured at `width`: a pass has at most PASS_ROWS rows.

    A wider pass over more requests would cost more than the drafts in it are worth. The smallest
    size always stays, since SGLang captures at least one.
    """
    kept = [size for size in sizes if size * width <= PASS_ROWS]
    return kept or list(sizes[:1])


@contextmanager
def pruned(width: int) -> Iterator[list[int]]:
    """Within this context SGLang's configuration has only the batch sizes captured at `width`.

    Yields these batch sizes. SGLang reads them from the leaf `cuda_graph_config`, not from
    `cuda_graph_bs_decode`.
    """
    graph = get_exec().graph
    config = graph.cuda_graph_config
    sizes = batch_sizes(sorted(config.decode.bs), width)
    decode = dataclasses.replace(config.decode, bs=sizes, max_bs=max(sizes))
    with graph.override(cuda_graph_config=dataclasses.replace(config, decode=decode)):
        yield sizes


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and its batches that decide how much memory buffers take."""

    requests: int
    """Largest captured batch."""
    context_len: int
    """Longest text in tokens."""
    heads: int
    """Query heads of one rank."""
    head_dim: int
    """Elements of one head."""
    kv_splits: int = 8
    """Parts into which triton splits the KV of a request."""


def graph_bytes(backend: str) -> int:
    """Memory of one CUDA graph and of what a backend keeps for it alone, in bytes."""
    return GRAPH_BYTES + (PLAN_BYTES if backend == "flashinfer" else 0)


def buffer_bytes(backend: str, shape: Shape, width: int) -> int:
    """Memory of one backend's buffers for the CUDA graphs of one width, in bytes.

    Read from `init_cuda_graph_state` of SGLang's backends; the masks of the prefixes are included.
    Unknown backends count like triton, which takes most.
    """
    requests, context_len = shape.requests, shape.context_len
    rows = requests * width
    mask = rows * (context_len + width) if width > 1 else 0
    if backend in ("fa3", "fa4"):
        # Page tables int32: two of decode, one of each verify and draft extend, two of trees.
        tables = 4 if width <= 2 else 6
        return requests * context_len * 4 * tables + (mask if width > 2 else 0)
    if backend == "flashinfer":
        return rows * context_len * (4 + 1)
    splits = rows * shape.heads * shape.kv_splits * (shape.head_dim + 1) * 4
    return splits + rows * context_len * 8 + mask
