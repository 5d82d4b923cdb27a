"""Reads prompts from a file: Spec-Bench's questions, or any JSONL with a `prompt` field."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from benchmark.harness.output import say
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models.prompts import UserPrompt, load

Item = TypeVar("Item")


def by_group(
    prompts: Sequence[UserPrompt], groups: Collection[str] | None = None
) -> dict[str, list[UserPrompt]]:
    """The prompts of each group, in the order of the file; of all groups if `groups` is None.

    Raises ConfigError for a group that the file does not have.
    """
    found: dict[str, list[UserPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.group, []).append(prompt)
    unknown = sorted(set(groups or ()) - found.keys())
    if unknown:
        raise ConfigError(f"there is no group {unknown[0]!r}; there are {', '.join(found)}")
    return {name: found[name] for name in found if groups is None or name in groups}


def spread(items: Sequence[Item], count: int | None) -> list[Item]:
    """`count` items at even distances, the same in every run; all items if there are no more."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def render(model: Path, prompts: Sequence[str]) -> list[str]:
    """The prompts in the model's chat template."""
    tokenizer = tokenizer_of(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]


def fitting(
    name: str, path: Path, model: Path, limit: int, groups: Collection[str] | None = None
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """By group: prompts of at most `limit` tokens in the chat template; the number of longer ones.

    Ends the process with a message of benchmark `name` if the file cannot be used or all prompts
    are too long.
    """
    try:
        loaded = by_group(load(path), groups)
    except ConfigError as error:
        sys.exit(f"{name}: error: {error}")
    found: dict[str, list[str]] = {}
    too_long: dict[str, int] = {}
    for group, members in loaded.items():
        texts = render(model, [prompt.text for prompt in members])
        lengths = map(len, token_ids(model, texts))
        short = [text for text, length in zip(texts, lengths, strict=True) if length <= limit]
        if short:
            found[group] = short
        too_long[group] = len(texts) - len(short)
        say(f"{group}: {len(short)} of {len(texts)} prompts have at most {limit} tokens")
    if not found:
        sys.exit(f"{name}: error: {path}: no prompt has at most {limit} tokens")
    return found, too_long


def of_round(prompts: Sequence[Item], count: int, number: int) -> list[Item]:
    """`count` prompts for round `number` (from 1); each round starts where the last one ended."""
    first = (number - 1) * count
    return [prompts[index % len(prompts)] for index in range(first, first + count)]


def mixed(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The prompts of all groups in turn, one prompt of each group at a time."""
    turns = zip_longest(*groups.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts in the model's chat template."""
    tokenizer = tokenizer_of(model)
    return [tokenizer(text).input_ids for text in texts]


@cache
def tokenizer_of(model: Path) -> Any:
    """The tokenizer of transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def lengths_of(prompts: Sequence[Sequence[int]], tokens: int, spread: float) -> list[int]:
    """Lengths of the answers, in tokens: `tokens` on average, and up to `spread` of it apart.

    The length depends on the prompt only. `spread` is from 0 to 1.
    """
    most = round(tokens * spread)
    draws = (random.Random(str(list(prompt))) for prompt in prompts)
    return [max(1, tokens + draw.randint(-most, most)) for draw in draws]
