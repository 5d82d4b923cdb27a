"""Tokenizers that a preloaded process loads for the programs that it forks.

SGLang and QSPEC load the tokenizer eight times in the processes of a server, and all models of the
tests have the same one. That would be more than half of the CPU time of a preloaded start.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

DEFAULTS = {
    "tokenizer_mode": "auto",
    "tokenizer_backend": "huggingface",
    "trust_remote_code": False,
    "revision": None,
    "tokenizer_revision": None,
}


class Tokenizers:
    """SGLang's `get_tokenizer`, which loads equal files once."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._loaded: dict[str, Any] = {}

    def __call__(self, path: str, *given: Any, **options: Any) -> Any:
        """A tokenizer with attributes of its own; the vocabulary is shared."""
        changed = {k: v for k, v in options.items() if k not in DEFAULTS or v != DEFAULTS[k]}
        if given or changed or not Path(path).is_dir():
            return self._load(path, *given, **options)
        key = _digest(Path(path))
        if key not in self._loaded:
            self._loaded[key] = self._load(path)
        own = copy.copy(self._loaded[key])
        own.name_or_path = path
        return own

    def load_for(self, arguments: Sequence[str]) -> None:
        """Load the tokenizer of the model that a command names."""
        path = next((value for name, value in _options(arguments) if name == "--model-path"), None)
        if path is not None:
            with contextlib.suppress(Exception):  # the command says what is wrong
                self(path)
                gc.freeze()


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    joined = [text.partition("=") for text in arguments if "=" in text]
    return [*pairwise(arguments), *((name, value) for name, _, value in joined)]


def _digest(folder: Path) -> str:
    """Of all that the tokenizer of a model depends on."""
    files = sorted(path for path in folder.iterdir() if "token" in path.name or "chat" in path.name)
    config = json.loads((folder / "config.json").read_text())
    parts = [repr([config.get(name) for name in ("model_type", "architectures")]).encode()]
    parts += [part for path in files for part in (path.name.encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
