"""Prompts: those that the package ships, and those of a file (Spec-Bench's, or any JSONL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sglang_qspec.errors import ConfigError

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
"""Spec-Bench counts these as one group, multi-turn conversation."""


@dataclass(frozen=True)
class UserPrompt:
    """A user's message, before the chat template."""

    group: str
    text: str


Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class DatasetLine(msgspec.Struct):
    """A line of a dataset: `category` and `turns` (Spec-Bench), or `prompt` and maybe `group`."""

    turns: Annotated[list[Text], msgspec.Meta(min_length=1)] | None = None
    category: Text | None = None
    prompt: Text | None = None
    group: Text = "all"

    def read(self) -> UserPrompt:
        """The prompt of the line, for Spec-Bench the first turn. Raises ValueError."""
        if self.turns is not None:
            if self.category is None:
                raise ValueError("a line with `turns` (Spec-Bench) must have a `category`")
            is_mt_bench = self.category in MT_BENCH_CATEGORIES
            return UserPrompt(MT_BENCH if is_mt_bench else self.category, self.turns[0])
        if self.prompt is None:
            raise ValueError("a line must have `turns` (Spec-Bench) or `prompt`")
        return UserPrompt(self.group, self.prompt)


def load(path: Path) -> list[UserPrompt]:
    """The prompts of a JSONL file, in its order; empty lines are skipped. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(msgspec.json.decode(line, type=DatasetLine).read())
            except ValueError as error:  # msgspec's errors too
                raise ConfigError(f"{path}:{number}: {error}") from None
    if not prompts:
        raise ConfigError(f"{path}: the file has no prompt")
    return prompts


def texts_of(path: Path | None, shipped: Sequence[str]) -> list[str]:
    """The prompts of the file at `path`, or the `shipped` ones without a file.

    Raises ConfigError.
    """
    return list(shipped) if path is None else [prompt.text for prompt in load(path)]


def chat_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as a user's message, or as it is without a chat template."""
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for text in texts
    ]


_SHIPPED = load(Path(__file__).with_name("prompts.jsonl"))
PROMPTS = tuple(prompt.text for prompt in _SHIPPED if prompt.group == "default")
"""Of our own, of mixed kinds and lengths; for the demo, the tests and `qspec models compare`."""
CALIBRATION = tuple(prompt.text for prompt in _SHIPPED if prompt.group == "calibration")
"""By which `qspec models skip-layers` chooses layers. None of them is in PROMPTS, so that
`compare` judges the choice by other texts."""
