"""The unfinished completions in the order of their urgency."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from sglang_qspec.sidecar.prompt import Completion, Kind, Place, Prompt, PromptKey

LOOKAHEAD = 64
"""How many waiting prompts have their first completions drafted before any has its others."""


class Line:
    """Owns the prompts that someone wants, and the order in which they are worked on.

    Waiting prompts stand in the order in which their servers will serve them; those that are done
    have left. The order of work is:

    1. step drafts, the oldest first: a target is about to verify them,
    2. the first completions of the next LOOKAHEAD prompts, each of which is worth more than all
       the others of a prompt together,
    3. the other completions of the next prompt, then the first one of the prompt LOOKAHEAD behind
       it, and so on down the queue,
    4. what is left to do for prompts that are served already, the shortest completions first.

    So a prompt that is about to be served gets all its completions while prompts far behind have
    none; if the drafter is slower than the server, each prompt still has its first one.
    """

    def __init__(self) -> None:
        self.prompts: dict[PromptKey, Prompt] = {}
        """By age, the oldest first."""
        self._waiting: list[Prompt] = []
        self._places: dict[Prompt, Place] = {}
        """Those by which `_waiting` is sorted."""
        self._served: dict[Prompt, None] = {}
        self._steps: dict[Prompt, None] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._served or self._steps)

    @property
    def has_steps(self) -> bool:
        """Whether a request that is served is drafted for, even if its draft rests just now."""
        return any(s.step_draft for p in self.prompts.values() for s in p.subscriptions.values())

    def add(self, prompt: Prompt) -> None:
        """Queue the prompt's unfinished completions."""
        self.prompts[prompt.key] = prompt
        self.arrange(prompt)

    def arrange(self, prompt: Prompt) -> None:
        """Put a prompt where it belongs, after its requests have changed."""
        self._take_out(prompt)
        if prompt.finished:
            return
        place = prompt.place
        if place is None:
            self._served[prompt] = None
        else:
            self._places[prompt] = place
            bisect.insort(self._waiting, prompt, key=self._places.__getitem__)

    def remove(self, prompt: Prompt) -> None:
        """Nobody wants the prompt any more."""
        del self.prompts[prompt.key]
        self._take_out(prompt)

    def begin(self, step: Prompt) -> None:
        """Queue a step draft, behind those that are queued already."""
        if not step.finished:
            self._steps[step] = None

    def withdraw(self, step: Prompt) -> None:
        """A step draft is of no use any more."""
        self._take_out(step)

    def finish(self, completion: Completion) -> None:
        """No more tokens of this completion will come."""
        completion.finished = True
        if completion.prompt.finished:
            self._take_out(completion.prompt)

    def urgent(self) -> Iterator[Completion]:
        """All unfinished completions, the most urgent first."""
        for step in self._steps:
            yield from _first(step)
        for prompt in self._waiting[:LOOKAHEAD]:
            yield from _first(prompt)
        for number, prompt in enumerate(self._waiting):
            yield from _others(prompt)
            yield from itertools.chain.from_iterable(map(_first, self._behind(number)))
        yield from self._left_to_do()

    def patient(self) -> Iterator[Completion]:
        """All unfinished completions, the least urgent first."""
        yield from reversed(self._left_to_do())
        for number in reversed(range(len(self._waiting))):
            for prompt in self._behind(number):
                yield from reversed(_first(prompt))
            yield from reversed(_others(self._waiting[number]))
        for prompt in reversed(self._waiting[:LOOKAHEAD]):
            yield from reversed(_first(prompt))
        for step in reversed(self._steps):
            yield from reversed(_first(step))

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the unfinished completions wait, each once."""
        urgent = list(self.urgent())
        assert urgent == list(reversed(list(self.patient()))), "two orders"
        assert len(urgent) == len(set(urgent)), "queued twice"
        queued = set(urgent)
        for key, prompt in self.prompts.items():
            assert prompt.key == key, "a prompt under another's key"
            steps = [s.step_draft for s in prompt.subscriptions.values() if s.step_draft]
            for completion in itertools.chain(*(p.completions for p in (prompt, *steps))):
                assert completion.finished != (completion in queued), "lost, or never finished"
                queued.discard(completion)
            if not prompt.finished:
                assert self._places.get(prompt) == prompt.place, "at another's place"
        assert not queued, "completions that nobody wants"
        places = [self._places[prompt] for prompt in self._waiting]
        assert places == sorted(places), "the queue is out of order"
        assert len(places) == len(self._places), "a place is held for nobody"

    def _behind(self, number: int) -> list[Prompt]:
        """The waiting prompt LOOKAHEAD behind that of this number, if there is one."""
        return self._waiting[number + LOOKAHEAD : number + LOOKAHEAD + 1]

    def _left_to_do(self) -> list[Completion]:
        """For the prompts that are served: first completions before others, then by length."""
        unfinished = [c for p in self._served for c in p.completions if not c.finished]
        return sorted(unfinished, key=lambda c: (c.kind is Kind.OTHER, len(c.token_ids)))

    def _take_out(self, prompt: Prompt) -> None:
        place = self._places.get(prompt)
        if place is not None:
            del self._waiting[
                bisect.bisect_left(self._waiting, place, key=self._places.__getitem__)
            ]
            del self._places[prompt]
        self._served.pop(prompt, None)
        self._steps.pop(prompt, None)


def _first(prompt: Prompt) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is not Kind.OTHER]


def _others(prompt: Prompt) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is Kind.OTHER]
