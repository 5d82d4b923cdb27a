"""The lengths of recent prompts and answers.

A sidecar that drafts for a request reads its whole prompt first. What that costs for each output
token depends on both lengths.
"""

from __future__ import annotations

MEMORY = 0.05
"""Weight of the latest request in a mean."""
MOST = 256
"""Maximum length that an answer is assumed to have before the first answer ends, in tokens."""


class RequestLengths:
    """Mean lengths, in tokens."""

    def __init__(self) -> None:
        self._prompt: float | None = None
        """Mean length of a prompt."""
        self._limit: float | None = None
        """Mean of the limits of answers, of which each counts as at most `MOST`."""
        self._answer: float | None = None
        """Mean length of an answer that has ended."""

    def arrive(self, prompt: int, limit: int) -> None:
        """Note a new request: the length of its prompt and the limit of its answer, in tokens."""
        self._prompt = _moved(self._prompt, prompt)
        self._limit = _moved(self._limit, min(limit, MOST))

    def end(self, answer: int) -> None:
        """Note that an answer of this length has ended."""
        self._answer = _moved(self._answer, answer)

    @property
    def prompt_tokens_per_output_token(self) -> float:
        """Prompt tokens of a request for each token of its answer; 0 before the first request."""
        answer = self._limit if self._answer is None else self._answer
        return 0.0 if self._prompt is None else self._prompt / max(1.0, answer or 1.0)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + MEMORY * (value - mean)
