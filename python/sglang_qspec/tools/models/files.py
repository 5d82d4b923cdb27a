"""The files of a checkpoint that have the same names for every model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError, QSpecError

INDEX = "model.safetensors.index.json"
"""Lists the file of each weight of a checkpoint in parts."""
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
        config: Any = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"model is {str(model)!r}, but must be the folder of a local checkpoint "
            "with a config.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return config


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
