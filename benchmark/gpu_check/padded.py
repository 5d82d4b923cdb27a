"""A checkpoint of the size of a large model that answers as a small one does.

A GPU's speedups need a target that costs as much as one in service, and a draft model that agrees
with it on real text. Where no such pair can be downloaded, the demo models are padded: zeros widen
the hidden state and add attention heads, and further neurons of the MLPs, whose outputs have zero
weights, take the rest of the parameters. A pass then reads and multiplies all of these weights, but
the logits are those of the small model, up to rounding.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_qspec.tools.models.files import read_config
from sglang_qspec.tools.models.safetensors_file import write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SCALE = 0.02
"""Standard deviation of the weights of further neurons."""
_WIDE = ("hidden_size", "num_attention_heads", "num_key_value_heads")


def pad(source: Path, folder: Path, factor: int, intermediate: int) -> int:
    """Write a padded copy of a Llama with tied embeddings to the new `folder`.

    Its hidden size and its numbers of heads are `factor` times as large, and each MLP has
    `intermediate` neurons. `factor` is a power of 4, because a norm over more zeros needs weights
    smaller by its square root, and bfloat16 holds these exactly. Returns the number of parameters.

    Raises ValueError if `factor` is no power of 4, or `intermediate` is too small.
    """
    from safetensors import safe_open  # torch takes seconds

    root = math.isqrt(factor)
    if root * root != factor or root.bit_count() != 1:
        raise ValueError(f"factor is {factor}, but must be a power of 4")
    config = read_config(source)
    if intermediate < config["intermediate_size"]:
        least = config["intermediate_size"]
        raise ValueError(f"intermediate is {intermediate}, but must be at least {least}")
    folder.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copyfile(source / name, folder / name)
    wide = {name: factor * config[name] for name in _WIDE}
    # The mean square over more zeros is smaller by the factor.
    changed = {**wide, "rms_norm_eps": config["rms_norm_eps"] / factor}
    changed |= {"intermediate_size": intermediate, "head_dim": _head_dim(config)}
    (folder / "config.json").write_text(json.dumps({**config, **changed}, indent=1))
    with safe_open(source / "model.safetensors", "pt") as file:
        shapes = {
            name: _shape(name, file.get_slice(name).get_shape(), factor, intermediate)
            for name in file.keys()  # noqa: SIM118
        }
        dtype = file.get_tensor(next(iter(shapes))).dtype
        pieces = _pieces(file, shapes, root, config["intermediate_size"])
        write_checkpoint(folder, list(shapes.items()), dtype, pieces)
    return sum(map(math.prod, shapes.values()))


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _shape(name: str, shape: list[int], factor: int, intermediate: int) -> list[int]:
    """The padded shape: each dimension of hidden states or heads grows by `factor`."""
    if ".mlp." in name:
        inner = [intermediate, factor * shape[1]]
        return [factor * shape[0], intermediate] if "down_proj" in name else inner
    if "embed_tokens" in name:
        return [shape[0], factor * shape[1]]
    return [factor * length for length in shape]


def _pieces(file: Any, shapes: dict[str, list[int]], root: int, neurons: int) -> Iterator[Tensor]:
    """The padded tensors in order; `neurons` is the number of an MLP's first neurons to keep."""
    import torch

    drawn: dict[tuple[int, ...], Tensor] = {}
    for name, shape in shapes.items():
        given = file.get_tensor(name)
        if "norm" in name:
            given = given / root
        padded = torch.zeros(shape, dtype=given.dtype)
        padded[tuple(map(slice, given.shape))] = given
        if "gate_proj" in name or "up_proj" in name:
            more = (shape[0] - neurons, shape[1])
            if more not in drawn:  # the same for all layers, since no result depends on them
                drawn[more] = torch.randn(more, dtype=given.dtype).mul_(SCALE)
            padded[neurons:] = drawn[more]
        yield padded
