"""The message with which rank 0 orders a decode pass on the other ranks, and its encoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie import DraftTrees


@dataclass(frozen=True)
class PassOrder:
    """A decode pass of all ranks."""

    trees: DraftTrees | None = None
    """Trees to verify; None for a pass without drafts. The ranks after rank 0 get neither sources
    nor scores."""
    rows: Sequence[int] | None = None
    """Indices of the requests of the pass in the batch; None for all."""
    last: bool = True
    """Whether this is the last pass of the round."""
    speculates: bool = True
    """False if speculation has ended on rank 0. No order follows in later rounds."""


class _Flags(IntFlag):
    VERIFIES = auto()
    RAGGED = auto()
    PART = auto()
    LAST = auto()
    SPECULATES = auto()


HEAD = 5
"""Number of values at the beginning: the flags, the number of `rows`, the number of trees, the
width of the trees, and the size of the order in bytes."""


def encode(order: PassOrder) -> NDArray[np.uint8]:
    """The bytes of an order: int32 values in the machine's byte order."""
    trees, rows = order.trees, order.rows
    flags = (
        (_Flags.VERIFIES if trees is not None else _Flags(0))
        | (_Flags.RAGGED if trees is not None and trees.ragged else _Flags(0))
        | (_Flags.PART if rows is not None else _Flags(0))
        | (_Flags.LAST if order.last else _Flags(0))
        | (_Flags.SPECULATES if order.speculates else _Flags(0))
    )
    shape = (0, 0) if trees is None else trees.token_ids.shape
    arrays = () if trees is None else (trees.sizes, trees.token_ids, trees.parents)
    values = np.concatenate(
        [
            np.array([int(flags), len(rows or ()), *shape, 0], np.int32),
            np.array(rows or (), np.int32),
            *(array.astype(np.int32).ravel() for array in arrays),
        ]
    )
    values[HEAD - 1] = values.nbytes
    return values.view(np.uint8)


def size_of(data: NDArray[np.uint8]) -> int:
    """The size of the order, in bytes, that begins with `data`, at least HEAD values."""
    return int(data[: 4 * HEAD].view(np.int32)[HEAD - 1])


def decode(data: NDArray[np.uint8]) -> PassOrder:
    """The order with these bytes, which `encode` has made."""
    values = data[: size_of(data)].view(np.int32)
    flags, count, requests, width, _ = values[:HEAD].tolist()
    parts = _split(values[HEAD:], count, requests, requests * width, requests * width)
    rows, sizes, token_ids, parents = parts
    shape = (requests, width)
    trees = DraftTrees(
        token_ids.reshape(shape),
        parents.reshape(shape),
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.float32),
        sizes,
        bool(flags & _Flags.RAGGED),
    )
    return PassOrder(
        trees if flags & _Flags.VERIFIES else None,
        rows.tolist() if flags & _Flags.PART else None,
        bool(flags & _Flags.LAST),
        bool(flags & _Flags.SPECULATES),
    )


def _split(values: NDArray[np.int32], *lengths: int) -> Iterator[NDArray[np.int32]]:
    """Copies of consecutive parts of `values`."""
    start = 0
    for length in lengths:
        yield values[start : start + length].copy()
        start += length
