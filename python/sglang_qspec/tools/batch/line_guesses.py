"""The guesses that a batch has for its lines: what was cut, and what earlier runs answered."""

from __future__ import annotations

import msgspec

from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.guesses.earlier import EarlierAnswers
from sglang_qspec.tools.guesses.guess import Guess
from sglang_qspec.tools.guesses.texts import prompt_in


class LineGuesses:
    """Finds guesses for a line, and keeps the text of an answer that is not complete."""

    def __init__(self, partials: Partials, earlier: EarlierAnswers | None = None) -> None:
        self._partials = partials
        self._earlier = earlier

    def find(self, line: Line) -> list[Guess]:
        """The guesses for a line, the likeliest first."""
        partial = self._partials.find(line)
        guesses = [] if partial is None else [partial]
        if self._earlier is not None:
            prompt = prompt_in(msgspec.json.decode(line.body))
            guesses += self._earlier.find(line.custom_id, prompt)
        return guesses

    def note(self, line: Line, guess: Guess) -> None:
        """Keep the text of an answer that is not complete, for another attempt."""
        self._partials.note(line, guess)

    def settle(self, line: Line) -> None:
        """Forget the text of a line that has its record."""
        self._partials.settle(line)
