"""Heads on disk, in the formats that SGLang and vLLM read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadConfig, HeadKind, read
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head, EagleHead, Head
from sglang_qspec.heads.weights import load_weights

AnyHead = EagleHead | MedusaHeads | HydraHead
WEIGHTS = "model.safetensors"
FIRST_LAYER = "layers.0."
"""How some checkpoints call `midlayer`."""
IGNORED = {
    HeadKind.EAGLE3: frozenset({"t2d", "embed_tokens.weight"}),
    HeadKind.EAGLE2: frozenset({"lm_head.weight", "embed_tokens.weight"}),
    HeadKind.MEDUSA: frozenset(),
    HeadKind.HYDRA: frozenset(),
}
"""What follows from `d2t` or belongs to the target."""

_AUTHORS = re.compile(r"(\d+)\.(\d+)(?:\.linear)?\.(weight|bias)")
"""How the authors of Medusa name weights: by head and part. The last part is the LM head."""


def save(head: AnyHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head into an existing folder, with weights in `dtype`."""
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if isinstance(head, Head):
        has_id = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        has_id[head.target_ids.cpu()] = True
        tensors["t2d"] = has_id
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    fields = {**head.config.fields, "dtype": str(dtype).removeprefix("torch.")}
    text = json.dumps(fields, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """Load an EAGLE head. Raises ConfigError if it is damaged, or not supported."""
    config = read(folder)
    found = {_own_name(name): tensor for name, tensor in load_weights(folder, device).items()}
    try:
        with torch.device("meta"):
            head = _empty(config, has_bias="fc.bias" in found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    if isinstance(head, Head):
        if "d2t" not in found and config.draft_vocab_size == config.vocab_size:
            found["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)
        _check(folder, head, found)
        _check_ids(folder, head, found["d2t"])
    else:
        _check(folder, head, found)
    _assign(head, found, dtype)
    head.rotary = type(head.rotary)(head.rotary.config).to(device)
    return head.eval()


def load_medusa(folder: Path, dtype: torch.dtype, device: torch.device) -> MedusaHeads:
    """Load Medusa heads. Raises ConfigError if they are damaged, or not supported."""
    config = read(folder)
    found = {
        _medusa_name(name, config.head_layers): tensor
        for name, tensor in load_weights(folder, device).items()
    }
    with torch.device("meta"):
        heads = MedusaHeads(config, bias=any(name.endswith(".bias") for name in found))
    _check(folder, heads, found)
    _assign(heads, found, dtype)
    return heads.eval()


def load_hydra(folder: Path, dtype: torch.dtype, device: torch.device) -> HydraHead:
    """Load a Hydra head. Raises ConfigError if it is damaged, or not supported."""
    config = read(folder)
    found = load_weights(folder, device)
    with torch.device("meta"):
        head = HydraHead(config)
    _check(folder, head, found)
    _check_ids(folder, head, found["d2t"])
    _assign(head, found, dtype)
    return head.eval()


def _medusa_name(name: str, layers: int) -> str:
    """The name of a weight in `MedusaHeads`; the authors number the parts of each head."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    own = _AUTHORS.fullmatch(name)
    if own is None:
        return name
    head, part, kind = own.groups()
    if int(part) == layers:
        return f"lm_heads.{head}.{kind}"
    return f"blocks.{head}.layers.{part}.{kind}"


def _assign(module: torch.nn.Module, found: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give an empty head its weights, with their numbers in `dtype`."""
    given = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int64)
        for name, tensor in found.items()
    }
    module.load_state_dict(given, assign=True)


def _empty(config: HeadConfig, *, has_bias: bool) -> EagleHead:
    """A head without weights."""
    if config.kind is HeadKind.EAGLE2:
        return Eagle2Head(config, bias=has_bias)
    return Head(config)


def load_projection(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The weights of an EAGLE-3 head's `fc` alone, [width, states * target width].

    Raises ConfigError.
    """
    return load(folder, dtype, device).fc.weight.detach().clone()


def _own_name(name: str) -> str:
    """The name of a weight in `Head`."""
    name = name.removeprefix("model.")
    return name.replace(FIRST_LAYER, "midlayer.", 1) if name.startswith(FIRST_LAYER) else name


def _check(folder: Path, head: AnyHead, found: dict[str, Any]) -> None:
    """Raise ConfigError unless `found` has the weights of the head; remove what is ignored."""
    for name in IGNORED[head.config.kind] & found.keys():
        del found[name]
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    for name, shape in wanted.items():
        if name not in found:
            raise ConfigError(f"{folder} has no weight {name}")
        if tuple(found[name].shape) != shape:
            raise ConfigError(
                f"{folder}: {name} has shape {list(found[name].shape)}, but must have {list(shape)}"
            )
    if more := sorted(found.keys() - wanted.keys()):
        raise ConfigError(f"{folder} has weights that are not supported: {', '.join(more[:3])}")


def _check_ids(folder: Path, head: Head | HydraHead, d2t: torch.Tensor) -> None:
    """Raise ConfigError unless all ids of the head are ids of the target."""
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size:
        raise ConfigError(
            f"{folder}: d2t leads to ids from {int(ids.min())} to {int(ids.max())}, but the target "
            f"has {head.config.vocab_size} ids"
        )
