"""Makes the requests with one right answer, greedy or with a seed, which the soak repeats.

A template has the names of `/generate`; `body` translates them for each of the three endpoints.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = (GENERATE, COMPLETIONS, CHAT)

POOL_SEED = 20
"""Seed of the pool; all soaks have the same pool."""
SEEDED_SHARE = 3
"""Every third template is sampled with a seed; the others are greedy."""

PREFACE = (
    "The following notes were taken by a traveller who walked along the coast from one harbour to "
    "the next, and who asked the people there about their work, their tools and their weather. "
)
QUESTIONS = (
    "Who mends the nets?",
    "List three things that the fishermen carry.",
    "Continue the story.",
    "Write a Python function that counts the boats.",
    "Why is the sea salty?",
    "The capital of Norway is",
    "Translate into French: the lamp is lit at nine, and the boats come home.",
    "Name the months of the year, each with its number of days.",
)
WORDS = ("wind", "rope", "lamp", "harbour", "bread", "stone", "winter", "road", "letter", "bridge")
STOPS: tuple[list[str], ...] = ([" the"], ["\n"], [".", " and"], ["harbour", "boat"])
OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""The OpenAI endpoints' names of parameters, by their names in `/generate`."""


@dataclass(frozen=True)
class Template:
    """A request without rid, guesses, controls and streaming: these must not change its answer."""

    path: str
    text: str
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters, by their names in `/generate`."""
    number: int | None = None
    """Place in the pool. None for a sampled request without a seed, because its answer varies."""

    @property
    def answers(self) -> int:
        """Number of answers to the request."""
        count: int = self.sampling.get("n", 1)
        return count

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0

    @property
    def penalised(self) -> bool:
        return any(name.endswith("_penalty") for name in self.sampling)

    def body(self, text: str, custom: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Body of an HTTP request with `text` as the prompt and `custom` as custom_params."""
        if self.path == GENERATE:
            sampling = {**self.sampling, **({"custom_params": custom} if custom else {})}
            return {"text": text, "sampling_params": sampling, **more}
        named = {OPENAI_NAMES.get(name, name): value for name, value in self.sampling.items()}
        if custom:
            named["custom_params"] = custom
        if more.get("stream"):
            named["stream_options"] = {"include_usage": True}
        if self.path == CHAT:
            return {"model": "m", "messages": [{"role": "user", "content": text}], **named, **more}
        return {"model": "m", "prompt": text, **named, **more}


def pool(size: int) -> list[Template]:
    """Templates of all endpoints, with prompts of 5 to 350 tokens and answers of up to 96."""
    rng = random.Random(POOL_SEED)
    return [
        Template(
            PATHS[number // SEEDED_SHARE % len(PATHS)],
            prompt(rng),
            {
                **(seeded(rng, number) if number % SEEDED_SHARE == 1 else {"temperature": 0}),
                **shape(rng),
            },
            number,
        )
        for number in range(size)
    ]


def unseeded(rng: random.Random) -> Template:
    """A sampled request without a seed. Its answer varies, so it is not compared."""
    sampling = seeded(rng, 0)
    del sampling["sampling_seed"]
    return Template(rng.choice(PATHS), prompt(rng), {**sampling, **shape(rng)})


def prompt(rng: random.Random) -> str:
    """A prompt: short, long, with a common beginning, or with repeated words."""
    question = rng.choice(QUESTIONS)
    kind = rng.randrange(5)
    if kind == 0:
        return question
    if kind == 1:
        return PREFACE * 3 + f"Note {rng.randrange(100)}. " + question
    if kind == 2:
        return " ".join(rng.choices(WORDS, k=rng.randint(10, 120))) + ". " + question
    if kind == 3:
        start = rng.randrange(100)
        return f"{start}, {start + 1}, {start + 2}," + f" {start}," * rng.randint(2, 40)
    return PREFACE * rng.randint(1, 8) + question


def shape(rng: random.Random) -> dict[str, Any]:
    """Length, end and number of the answers, and for some requests penalties."""
    found: dict[str, Any] = {"max_new_tokens": rng.choice((1, 2, 7, 16, 33, 64, 96))}
    chance = rng.random()
    if chance < 0.15:
        found["ignore_eos"] = True
    elif chance < 0.35:
        found["stop"] = rng.choice(STOPS)
    elif chance < 0.45:
        found["min_new_tokens"] = min(8, found["max_new_tokens"])
    if rng.random() < 0.25:
        found.update(rng.choice(_PENALTIES))
    if rng.random() < 0.15:
        found["n"] = rng.randint(2, 3)
    return found


def seeded(rng: random.Random, seed: int) -> dict[str, Any]:
    """Temperature, seed and filters of a sampled request."""
    found: dict[str, Any] = {"temperature": rng.choice((0.5, 0.8, 1.0, 1.3)), "sampling_seed": seed}
    found.update(rng.choice(_FILTERS))
    return found


# Without overlap SGLang applies the penalties of a request in the order of a Python set of classes,
# which differs between processes. So an additive and a multiplicative penalty together give no
# reproducible answer.
_PENALTIES: Sequence[dict[str, float]] = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.9},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.8},
)
_FILTERS: Sequence[dict[str, float]] = (
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.95},
)
