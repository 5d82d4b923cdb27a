"""Makes the loads of `bench_worst_case`: prompts, and misleading guesses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.harness.dataset import of_round, render, tokenizer_of
from benchmark.prompts import PROMPTS
from benchmark.worst.cases import GUESSES, LONG, RANDOM, SIDECAR, SPEC_BENCH

DOCUMENT = Path(__file__).with_name("document.txt")
"""File with the text with which long prompts begin."""
RANDOM_PROMPT_TOKENS = 64
GUESS_TOKENS = 4096
"""Maximum guess tokens of a request; the default of a server."""
MOST_COPIES = 4


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and the length of their answers in tokens."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    shared: int = 0
    """Length of the common beginning of all prompts, which is in the server's cache."""


class Loads:
    """The loads of all cases; they are the same in every run."""

    def __init__(self, model: Path, spec_bench: Sequence[str], context: int, tokens: int) -> None:
        """`spec_bench` are prompts in the chat template.

        `context` and `tokens` are lengths of long prompts and of answers, in tokens.
        """
        tokenizer = tokenizer_of(model)
        self._spec_bench = [tuple(tokenizer(text).input_ids) for text in spec_bench]
        own = [f"{text} (Variant {n}.)" for n in range(1, 4) for text in PROMPTS]
        self._own = [tuple(tokenizer(text).input_ids) for text in render(model, own)]
        self._document = tuple(tokenizer(DOCUMENT.read_text(encoding="utf-8")).input_ids)[:context]
        self._questions = [
            tuple(tokenizer(f"\n\nIn other words, part {n} of this says that").input_ids)
            for n in range(1, 65)
        ]
        # The first ids are control tokens.
        self._ordinary = range(100, tokenizer.vocab_size)
        self._tokens = tokens

    def of(self, case: str, running: int, number: int) -> Prompts:
        """The load of a case in round `number`."""
        if case == RANDOM:
            draw = random.Random(f"{running} {number}")
            drawn = (draw.choices(self._ordinary, k=RANDOM_PROMPT_TOKENS) for _ in range(running))
            return self._load(map(tuple, drawn))
        if case == LONG:
            prompts = [self._document + self._questions[i % 64] for i in range(running)]
            return self._load(prompts, shared=len(self._document))
        if case == SPEC_BENCH:
            return self._load(of_round(self._spec_bench, max(4, 2 * running), number))
        if case in (GUESSES, SIDECAR):
            return self._load(of_round(self._own, running, number))
        raise ValueError(f"{case!r} is no case")

    def _load(self, prompts: Iterable[tuple[int, ...]], shared: int = 0) -> Prompts:
        return Prompts(tuple(prompts), self._tokens, shared)


def misleading(answer: Sequence[int], vocab_size: int) -> list[int | None]:
    """Guesses that match the answer at each position, and propose a wrong next token.

    A guess contains every pair of neighbouring tokens of the answer, followed by a wrong token. The
    copies of the guess agree with each other, so the server trusts them until they fail.
    """
    guess: list[int] = []
    for first, second, following in zip(answer, answer[1:], answer[2:], strict=False):
        guess += [first, second, (following + 1) % vocab_size]
    copies = max(1, min(MOST_COPIES, GUESS_TOKENS // max(len(guess), 1)))
    one: list[int | None] = [*guess[:GUESS_TOKENS], None]
    return (one * copies)[:-1]


def sampling(temperature: float, max_new_tokens: int, **custom_params: Any) -> dict[str, Any]:
    """Sampling parameters of a request for exactly `max_new_tokens`."""
    return {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        **({"custom_params": custom_params} if custom_params else {}),
    }
