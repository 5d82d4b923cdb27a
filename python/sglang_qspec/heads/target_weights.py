"""The weights of a target that its heads read: the embeddings and the LM head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sglang_qspec.errors import ConfigError

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
"""How the names of the target's embeddings and LM head end."""


def target_weight(folder: Path, name: str, shape: Sequence[int]) -> Tensor:
    """The weight in a checkpoint with a name that ends in `name`, the first of several.

    Raises ConfigError if there is none, or if it has another `shape`.
    """
    found = find(folder, name)
    if found is None:
        raise ConfigError(f"{folder} has no weight that ends with {name}, which a head reads")
    if list(found.shape) != list(shape):
        raise ConfigError(
            f"{name} of {folder} has shape {list(found.shape)}, but the head needs {list(shape)}"
        )
    return found


def find(folder: Path, name: str) -> Tensor | None:
    """As `target_weight`, of any shape; None without one."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for each in file.keys():  # noqa: SIM118 - the object has no __iter__
                if each.endswith(name):
                    found: Tensor = file.get_tensor(each)
                    return found
    return None
