"""Reads the prompts that the page offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ClientError, shown

MOST = 1000
"""Maximum number of prompts that the page offers."""


def load(path: Path) -> list[str]:
    """The prompts of a file. Raises ClientError.

    A `.jsonl` file has an object with `prompt`, or with `turns` as Spec-Bench has, in each line.
    Any other file has a prompt in each line. Empty lines are skipped.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"the file of prompts cannot be read: {error}") from None
    read = _of_json if path.suffix == ".jsonl" else str.strip
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(read(line))
            except ValueError as error:
                raise ClientError(f"{path}:{number}: {error}") from None
    if not 1 <= len(prompts) <= MOST:
        raise ClientError(f"{path} has {len(prompts)} prompts, but must have 1 to {MOST}")
    return prompts


def _of_json(line: str) -> str:
    """The prompt of a line of JSON. Raises ValueError."""
    found: Any = json.loads(line)
    if isinstance(found, dict):
        turns = found.get("turns")
        found = turns[0] if isinstance(turns, list) and turns else found.get("prompt")
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"{shown(line)} must be an object with the text `prompt` or `turns`")
    return found
