"""The weight files of a head, in the format of safetensors or of torch.

Publishers of heads use both. Of a file in torch's format only tensors are read (`weights_only`), so
it runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from sglang_qspec.errors import ConfigError, first_line
from sglang_qspec.heads.files import SAFETENSORS, weight_files


def load_weights(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """All tensors of a head's weight files, by name. Raises ConfigError."""
    tensors: dict[str, torch.Tensor] = {}
    paths = weight_files(folder)
    for path in paths:
        tensors |= _load(path, device)
    if not paths:
        raise ConfigError(f"{folder} has no weights: no file *.safetensors, *.bin or *.pt")
    return tensors


def weight_shapes(folder: Path) -> list[Sequence[int]]:
    """The shapes of all tensors of a head's weight files. Raises ConfigError."""
    shapes: list[Sequence[int]] = []
    for path in weight_files(folder):
        if path.suffix == SAFETENSORS:
            try:
                with safe_open(path, framework="numpy") as file:
                    names = file.keys()  # the object has no __iter__
                    shapes += [file.get_slice(name).get_shape() for name in names]
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: {error}") from None
        else:
            shapes += [tuple(tensor.shape) for tensor in _load(path, torch.device("cpu")).values()]
    return shapes


def _load(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """All tensors of a file. Raises ConfigError."""
    try:
        if path.suffix == SAFETENSORS:
            return load_file(path, device=str(device))
        found = torch.load(path, map_location=device, weights_only=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001 - damage makes torch raise errors of many kinds
        why = first_line(error) or type(error).__name__
        raise ConfigError(f"{path} is not a file of tensors as torch writes it: {why}") from None
    if not isinstance(found, dict) or not all(map(_is_weight, found.items())):
        raise ConfigError(f"{path} has other values than tensors by name")
    return found


def _is_weight(item: tuple[object, object]) -> bool:
    """Whether an item of a file has a name and a tensor."""
    name, value = item
    return isinstance(name, str) and isinstance(value, torch.Tensor)
