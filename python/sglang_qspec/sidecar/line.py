"""The unfinished completions in the order of their urgency."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sglang_qspec.sidecar.prompt import Completion, Prompt, PromptKey


class Line:
    """Owns the prompts that someone wants, and the order in which they are worked on.

    First come, first served; the greedy completion of every prompt before any sampled one, and
    both before all of the prompts that are deferred.
    """

    def __init__(self) -> None:
        self.prompts: dict[PromptKey, Prompt] = {}
        """By age, the oldest first."""
        self._greedy: dict[Completion, None] = {}
        self._sampled: dict[Completion, None] = {}
        self._deferred: dict[Completion, None] = {}
        self._deferred_prompts: set[PromptKey] = set()

    def __bool__(self) -> bool:
        return bool(self._greedy or self._sampled or self._deferred)

    def add(self, prompt: Prompt) -> None:
        """Queue the prompt's unfinished completions."""
        self.prompts[prompt.key] = prompt
        self._enter(prompt)

    def defer(self, prompt: Prompt) -> None:
        """Work on it only when nothing else is to be done."""
        if prompt.key not in self._deferred_prompts:
            self._leave(prompt)
            self._deferred_prompts.add(prompt.key)
            self._enter(prompt)

    def restore(self, prompt: Prompt) -> None:
        """Let a prompt that was deferred queue up again; others stay where they are."""
        if prompt.key in self._deferred_prompts:
            self._leave(prompt)
            self._deferred_prompts.remove(prompt.key)
            self._enter(prompt)

    def remove(self, prompt: Prompt) -> None:
        """Nobody wants the prompt any more."""
        del self.prompts[prompt.key]
        self._leave(prompt)
        self._deferred_prompts.discard(prompt.key)

    def finish(self, completion: Completion) -> None:
        """No more tokens of this completion will come."""
        completion.finished = True
        del self._part(completion)[completion]

    def urgent(self) -> Iterator[Completion]:
        """All unfinished completions, the most urgent first."""
        return itertools.chain(self._greedy, self._sampled, self._deferred)

    def patient(self) -> Iterator[Completion]:
        """All unfinished completions, the least urgent first."""
        parts = (self._deferred, self._sampled, self._greedy)
        return itertools.chain.from_iterable(map(reversed, parts))

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the unfinished completions of prompts wait."""
        waiting = set(self.urgent())
        for key, prompt in self.prompts.items():
            assert prompt.key == key, "a prompt under another's key"
            for completion in prompt.completions:
                assert completion.finished != (completion in waiting), "lost, or never finished"
                waiting.discard(completion)
        assert not waiting, "completions of a prompt that nobody wants"
        assert self._deferred_prompts <= self.prompts.keys(), "a deferred prompt is gone"
        for completion in self._deferred:
            assert completion.prompt.key in self._deferred_prompts, "deferred without a reason"

    def _enter(self, prompt: Prompt) -> None:
        for completion in prompt.completions:
            if not completion.finished:
                self._part(completion)[completion] = None

    def _leave(self, prompt: Prompt) -> None:
        for completion in prompt.completions:
            self._part(completion).pop(completion, None)

    def _part(self, completion: Completion) -> dict[Completion, None]:
        if completion.prompt.key in self._deferred_prompts:
            return self._deferred
        return self._sampled if completion.index else self._greedy
