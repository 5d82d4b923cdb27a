"""The unfinished completions in the order of their urgency."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sglang_qspec.sidecar.prompt import Completion, Prompt, PromptKey


class Line:
    """Owns the prompts that someone wants, and the order in which they are worked on.

    First come, first served; the greedy completion of every prompt before any sampled one.
    """

    def __init__(self) -> None:
        self.prompts: dict[PromptKey, Prompt] = {}
        """By age, the oldest first."""
        self._greedy: dict[Completion, None] = {}
        self._sampled: dict[Completion, None] = {}

    def __bool__(self) -> bool:
        return bool(self._greedy or self._sampled)

    def add(self, prompt: Prompt) -> None:
        """Queue the prompt's unfinished completions."""
        self.prompts[prompt.key] = prompt
        for completion in prompt.completions:
            if not completion.finished:
                self._part(completion)[completion] = None

    def remove(self, prompt: Prompt) -> None:
        """Nobody wants the prompt any more."""
        del self.prompts[prompt.key]
        for completion in prompt.completions:
            self._part(completion).pop(completion, None)

    def finish(self, completion: Completion) -> None:
        """No more tokens of this completion will come."""
        completion.finished = True
        del self._part(completion)[completion]

    def urgent(self) -> Iterator[Completion]:
        """All unfinished completions, the most urgent first."""
        return itertools.chain(self._greedy, self._sampled)

    def patient(self) -> Iterator[Completion]:
        """All unfinished completions, the least urgent first."""
        return itertools.chain(reversed(self._sampled), reversed(self._greedy))

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the unfinished completions of prompts wait."""
        waiting = set(self.urgent())
        for key, prompt in self.prompts.items():
            assert prompt.key == key, "a prompt under another's key"
            for completion in prompt.completions:
                assert completion.finished != (completion in waiting), "lost, or never finished"
                waiting.discard(completion)
        assert not waiting, "completions of a prompt that nobody wants"

    def _part(self, completion: Completion) -> dict[Completion, None]:
        return self._sampled if completion.index else self._greedy
