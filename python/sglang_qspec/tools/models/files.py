"""The files of a checkpoint that have the same names for every model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models.cache import MANIFEST

INDEX = "model.safetensors.index.json"
"""Lists the file of each weight of a checkpoint in parts."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How the names of files with weights end."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def read_config(model: Path) -> dict[str, Any]:
    """Return the content of `config.json`. Raises ConfigError if `model` has none, or no object."""
    path = model / "config.json"
    try:
        config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"model is {str(model)!r}, but must be the folder of a local checkpoint "
            "with a config.json"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, and ConfigError if it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, with a line for each value."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_index(folder: Path, places: Mapping[str, str], size: int) -> None:
    """Write which file has each weight of a checkpoint in parts, of `size` bytes together."""
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(places)})


def check_new(output: Path) -> None:
    """Raise QSpecError unless `output` is an empty folder or does not exist.

    An empty folder is removed, because the finished folder is renamed to its name. A mount point
    cannot be removed.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise QSpecError(f"{output} exists already; give a new folder, or remove this one")
    if output.exists():
        try:
            output.rmdir()
        except OSError as error:
            raise QSpecError(
                f"{output} cannot be replaced ({error.strerror}); give a new folder inside it"
            ) from None


def copy_files(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Make the files `names` of `folder` those of `source`; a file that it lacks is removed."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def copy_others(source: Path, folder: Path) -> None:
    """Copy all files of a checkpoint but its weights, their index and the manifest of the cache."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in (INDEX, MANIFEST):
            shutil.copyfile(path, folder / path.name)
