"""Guesses the next tokens of completions with the draft model's own head.

The draft model verifies a guess in its next pass, in a row of its own: it samples the token behind
the newest one as always, and if this is the guess, the pass has also computed the token behind it.
So completions have the same tokens as without a head, and some passes give two of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from sglang_qspec.sidecar.guess_choice import GuessChoice
from sglang_qspec.sidecar.hydra_model import ReadyHydra
from sglang_qspec.sidecar.text import Completion, Guess
from sglang_qspec.transfers import to_device

logger = logging.getLogger(__name__)


class Head(Protocol):
    """The head of a draft model."""

    def guess(self, token_ids: Sequence[int], states: torch.Tensor) -> list[Guess]:
        """The likeliest tokens behind tokens, which the draft model sampled behind its `states`.

        `states` are [n, width], what its LM head reads.
        """


class OwnHead:
    """A Hydra head of the draft model."""

    def __init__(self, head: ReadyHydra) -> None:
        self._head = head

    @torch.inference_mode()
    def guess(self, token_ids: Sequence[int], states: torch.Tensor) -> list[Guess]:
        """As `Head`."""
        (ids,) = to_device(states.device, np.array(token_ids, np.int64))
        logits, _ = self._head.read(ids, states)
        most, place = logits.softmax(-1).nan_to_num(0.0).max(-1)
        found = self._head.target_ids[place].tolist()
        return [Guess(*each) for each in zip(found, most.tolist(), strict=True)]


class GuessedPass:
    """The rows of a decode pass: the newest token of each completion, and guesses behind some."""

    def __init__(self, completions: Sequence[Completion], guesses: Sequence[Guess | None]) -> None:
        """`guesses` are those to verify, by completion."""
        self.guesses = guesses
        self.token_ids: list[int] = []
        """The token of each row, those of a completion one after the other."""
        self.completions: list[Completion] = []
        """The completion of each row."""
        self.ahead: list[int] = []
        """Number of tokens of each row that its completion does not have yet."""
        self.firsts: list[int] = []
        """The row of each completion's newest token."""
        for completion, guess in zip(completions, guesses, strict=True):
            self.firsts.append(len(self.token_ids))
            own = [completion.last] if guess is None else [completion.last, guess.token_id]
            self.token_ids += own
            self.completions += [completion] * len(own)
            self.ahead += range(len(own))

    @property
    def counts(self) -> list[int]:
        """Number of rows of each completion."""
        return [1 if guess is None else 2 for guess in self.guesses]

    def are_right(self, sampled: Sequence[int]) -> list[bool]:
        """Whether the token `sampled` behind each completion's newest one is its guess."""
        return [
            guess is not None and sampled[first] == guess.token_id
            for first, guess in zip(self.firsts, self.guesses, strict=True)
        ]


class Guesser:
    """Owns the head of a draft model, and what is known about its guesses."""

    def __init__(self, head: Head, clock: Callable[[], float] = time.perf_counter) -> None:
        self._head: Head | None = head
        self.choice = GuessChoice()
        self._clock = clock

    def chosen(self, completions: Sequence[Completion], most: int) -> list[Guess | None]:
        """The guess that the next pass verifies for each completion, at most `most` in all."""
        places = [
            place
            for place, each in enumerate(completions)
            if each.guess is not None and len(each.token_ids) + 1 < each.text.limit
        ]
        found: list[Guess | None] = [None] * len(completions)
        if not places:
            return found
        guesses = [completions[place].guess for place in places]
        probabilities = [0.0 if each is None else each.probability for each in guesses]
        for number in self.choice.choose(len(completions), probabilities)[:most]:
            found[places[number]] = guesses[number]
        return found

    def judge(self, guesses: Sequence[Guess | None], right: Sequence[bool]) -> None:
        """Record which of the verified guesses were right."""
        for guess, is_right in zip(guesses, right, strict=True):
            if guess is not None:
                self.choice.judge(guess.probability, right=is_right)

    def guess(self, completions: Sequence[Completion], states: torch.Tensor) -> None:
        """Guess what follows the newest token of each completion that goes on.

        `states`, [n, width], are those behind which these tokens were sampled. An error of the head
        ends all guesses: drafts do not need them.
        """
        for each in completions:
            each.guess = None
        places = [place for place, each in enumerate(completions) if not each.finished]
        if self._head is None or not places or not self.choice.asks(len(places)):
            return
        began = self._clock()
        try:
            going = [completions[place] for place in places]
            found = self._head.guess([each.last for each in going], states[places])
        except Exception:
            logger.exception("The draft model's head failed; the sidecar goes on without it")
            self._head = None
            return
        for each, guess in zip(going, found, strict=True):
            each.guess = guess
        self.choice.observe_call(self._clock() - began)
