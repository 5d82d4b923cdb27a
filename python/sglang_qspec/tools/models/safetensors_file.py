"""Writes a checkpoint in safetensors files, tensor after tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_qspec.tools.models.files import write_index

if TYPE_CHECKING:
    import torch

    Shapes = Sequence[tuple[str, Sequence[int]]]
    """Names and shapes of tensors, in the order in which they are written."""

SHARD_BYTES = 5 * 10**9
"""Bytes from which on the weights of a checkpoint are divided into several files."""
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_checkpoint(
    folder: Path, shapes: Shapes, dtype: torch.dtype, pieces: Iterable[torch.Tensor]
) -> None:
    """Write all tensors of a checkpoint of one dtype into `folder`.

    `pieces` has the values of the tensors one after another. The pieces have any shapes, but none
    has values of two files.
    """
    shards = _shards(shapes, dtype.itemsize)
    left = iter(pieces)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        _write_file(folder / name, shard, dtype, left)
        places |= dict.fromkeys((tensor for tensor, _ in shard), name)
    if len(shards) > 1:
        size = sum(math.prod(shape) for _, shape in shapes) * dtype.itemsize
        write_index(folder, places, size)


def _shards(shapes: Shapes, width: int) -> list[list[tuple[str, Sequence[int]]]]:
    """Divide tensors with values of `width` bytes among files."""
    shards: list[list[tuple[str, Sequence[int]]]] = [[]]
    size = 0
    for name, shape in shapes:
        size += math.prod(shape) * width
        if shards[-1] and size > SHARD_BYTES:
            shards.append([])
            size = math.prod(shape) * width
        shards[-1].append((name, shape))
    return shards


def _write_file(
    path: Path, shapes: Shapes, dtype: torch.dtype, pieces: Iterator[torch.Tensor]
) -> None:
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for name, shape in shapes:
        end = size + math.prod(shape) * dtype.itemsize
        kind = _NAMES[str(dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while size > 0:
            piece = next(pieces).contiguous()
            file.write(piece.view(-1).view(torch.uint8).numpy().data)
            size -= piece.nbytes
