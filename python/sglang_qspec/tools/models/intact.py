"""Checks that a local checkpoint has all weights of its model, before another is made of it.

transformers fills weights that are missing, or that have another shape, with random numbers.
"""

from __future__ import annotations

from pathlib import Path

from sglang_qspec.errors import ConfigError, first_line, shown
from sglang_qspec.tools.models.files import INDEX, read_json


def check_intact(model: Path) -> None:
    """Raise ConfigError if a file of weights is missing or damaged, or if weights do not fit.

    Reads no weights. A model that transformers does not know as a language model gets no check of
    its shapes.
    """
    check_files(model)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it reports in many lines what is said here in one
    try:
        if type(AutoConfig.from_pretrained(model)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return
        _, found = AutoModelForCausalLM.from_pretrained(
            model, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise ConfigError(f"{model} cannot be loaded: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    for name, held, expected in sorted(found["mismatched_keys"]):
        raise ConfigError(
            f"{model} has {name} of the shape {list(held)}, but its configuration needs "
            f"{list(expected)}"
        )
    for name in sorted(found["missing_keys"]):
        raise ConfigError(f"{model} has no {name}, which its configuration needs")


def check_files(model: Path) -> None:
    """Raise ConfigError unless the index and the files of the weights fit together."""
    from safetensors import SafetensorError, safe_open

    held: dict[str, set[str]] = {}
    placed = _index(model)
    for name in sorted(set(placed.values()) or {path.name for path in model.glob("*.safetensors")}):
        path = model / name
        if not path.is_file():
            raise ConfigError(f"{model / INDEX} names {name!r}, but there is no such file")
        try:
            with safe_open(path, framework="pt") as file:
                held[name] = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    if not held:
        raise ConfigError(f"{model} has no .safetensors files; convert it to that format first")
    for weight, name in placed.items():
        if weight not in held[name]:
            raise ConfigError(f"{model / INDEX} says that {name} has {weight!r}, but it has not")


def _index(model: Path) -> dict[str, str]:
    """The file of each weight; empty for a checkpoint without an index."""
    path = model / INDEX
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{path} has the weight_map {shown(placed)}, but must have an object")
    for weight, name in placed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{path} places {weight!r} in {shown(name)}, but must name a file")
    return placed
