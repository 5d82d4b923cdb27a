"""Prompts: those that the package ships, and those of a file (Spec-Bench's, or any JSONL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sglang_qspec.errors import ConfigError

PROMPTS = (
    "Explain in simple words why the sky is blue during the day and red at sunset.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five ways to save water at home, with one sentence for each.",
    "What is the difference between a list and a tuple in Python? Give a small example.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs "
    "3 euros. How much money does the baker earn in a day? Show the steps.",
    "Summarize the following text in two sentences: The first bicycles had no pedals. Riders "
    "pushed themselves along with their feet on the ground, and steered with a simple bar. Decades "
    "later, pedals were fixed to the front wheel, and soon after a chain drove the rear wheel, "
    "which made cycling faster, safer and more comfortable for everyone.",
    "Write a polite email to a neighbour who plays loud music late at night.",
    "Translate into French: The train to the mountains leaves at nine, and the children are ready.",
    "Give me a recipe for a simple vegetable soup, with the ingredients first.",
    "Who was Marie Curie, and what is she known for?",
    "Write a Python function that returns the largest number in a list, and explain each line.",
    "Plan a weekend trip to a small town by the sea for a family with two children.",
)
"""Of our own, of mixed kinds and lengths; for the demo, the tests and `qspec models compare`."""

CALIBRATION = (
    "Explain how a refrigerator keeps food cold.",
    "Write a short dialogue between a teacher and a pupil who forgot the homework.",
    "A train travels 180 kilometres in two hours and then 60 kilometres in half an hour. What is "
    "its average speed? Show the steps.",
    "Write a Python function that counts the vowels of a text.",
    "Summarize in one sentence: Bees collect nectar from flowers and turn it into honey. While "
    "they fly from flower to flower they also carry pollen, so many plants depend on them.",
    "Name three large rivers in South America, and one fact about each.",
    "Translate into Spanish: My sister works in a library near the harbour.",
    "Give advice to someone who wants to learn to play the guitar.",
)
"""By which `qspec models skip-layers` chooses layers. None of them is in PROMPTS, so that
`compare` judges the choice by other texts."""

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
"""Spec-Bench counts these as one group, multi-turn conversation."""


@dataclass(frozen=True)
class Prompt:
    """A user's message, before the chat template."""

    group: str
    text: str


Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class Line(msgspec.Struct):
    """A line of a dataset: `category` and `turns` (Spec-Bench), or `prompt` and maybe `group`."""

    turns: Annotated[list[Text], msgspec.Meta(min_length=1)] | None = None
    category: Text | None = None
    prompt: Text | None = None
    group: Text = "all"

    def read(self) -> Prompt:
        """The prompt of the line, for Spec-Bench the first turn. Raises ValueError."""
        if self.turns is not None:
            if self.category is None:
                raise ValueError("a line with `turns` (Spec-Bench) must have a `category`")
            is_mt_bench = self.category in MT_BENCH_CATEGORIES
            return Prompt(MT_BENCH if is_mt_bench else self.category, self.turns[0])
        if self.prompt is None:
            raise ValueError("a line must have `turns` (Spec-Bench) or `prompt`")
        return Prompt(self.group, self.prompt)


def load(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, in its order; empty lines are skipped. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(msgspec.json.decode(line, type=Line).read())
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
