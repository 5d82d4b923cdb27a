"""A head of a `ScriptedModel`, which guesses by a script of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_qspec.sidecar.guess_choice import GuessChoice
from sglang_qspec.sidecar.guesser import Guesser, Head
from sglang_qspec.sidecar.text import Guess
from test.sidecar.scripted import Script, ScriptedModel


class ScriptedHead:
    """A head that guesses what a function makes of the text before the guess."""

    def __init__(self, model: ScriptedModel, guess: Script, probability: float = 0.9) -> None:
        self._model, self._guess, self._probability = model, guess, probability
        self.calls = 0
        self.failures: list[Exception] = []

    def guess(self, token_ids: Sequence[int], states: torch.Tensor) -> list[Guess]:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        texts = [
            (*self._model.seen[place], token)
            for place, token in zip(states[:, 0].tolist(), token_ids, strict=True)
        ]
        return [Guess(self._guess(text), self._probability) for text in texts]


class FreeRows(GuessChoice):
    """A choice that keeps the times of passes that it expects."""

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Ignore the time of a real pass."""


def eager(head: Head) -> Guesser:
    """A guesser for which passes take as long with guesses as without."""
    made = Guesser(head, clock=lambda: 0.0)
    made.choice = FreeRows()
    made.choice.expect([(1, 1.0), (64, 1.0)])
    return made
