"""Reads the prompts that the page offers."""

from __future__ import annotations

from pathlib import Path

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models.prompts import texts_of

MOST = 1000
"""Maximum number of prompts that the page offers."""


def load(path: Path) -> list[str]:
    """The prompts of a file. Raises ConfigError.

    `models.prompts` reads a `.jsonl` file. Any other file has a prompt in each line. Empty lines
    are skipped.
    """
    if path.suffix == ".jsonl":
        prompts = texts_of(path, ())
    else:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of prompts cannot be read: {error}") from None
        prompts = [line.strip() for line in lines if line.strip()]
    if not 1 <= len(prompts) <= MOST:
        raise ConfigError(f"{path} has {len(prompts)} prompts, but must have 1 to {MOST}")
    return prompts
