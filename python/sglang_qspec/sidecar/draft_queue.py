"""One server's unfinished completions in the order of their urgency."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from sglang_qspec.sidecar.prompt import Completion, Kind, Place, Prompt

LOOKAHEAD = 64
"""How many waiting prompts have their first completions drafted before any has its others."""

Urgency = tuple[int, ...]
"""A key of the order of work: the smallest is the most urgent."""


class DraftQueue:
    """Owns the order in which the prompts of one server are worked on.

    Waiting prompts stand in the order in which their server will serve them; those that are done
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
        self.seconds = 0.0
        """Time that passes have spent on these prompts, as `Turns` counts it."""
        self._waiting: list[Prompt] = []
        self._places: dict[Prompt, Place] = {}
        """Those by which `_waiting` is sorted."""
        self._served: dict[Prompt, int] = {}
        self._steps: dict[Prompt, int] = {}
        """Prompts with the numbers under which they were queued."""
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._served or self._steps)

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._places or prompt in self._served or prompt in self._steps

    def arrange(self, prompt: Prompt) -> None:
        """Put a prompt where it belongs, after its requests have changed."""
        self.remove(prompt)
        if prompt.finished:
            return
        place = prompt.place
        if place is None:
            self._served[prompt] = next(self._numbers)
        else:
            self._places[prompt] = place
            bisect.insort(self._waiting, prompt, key=self._places.__getitem__)

    def begin(self, step: Prompt) -> None:
        """Queue a step draft, behind those that are queued already."""
        if not step.finished:
            self._steps.setdefault(step, next(self._numbers))

    def remove(self, prompt: Prompt) -> None:
        """The prompt, or the step draft, has nothing to be drafted."""
        if prompt in self._places:
            del self._waiting[self._number_of(prompt)]
            del self._places[prompt]
        self._served.pop(prompt, None)
        self._steps.pop(prompt, None)

    def urgent(self) -> Iterator[Completion]:
        """All unfinished completions, the most urgent first."""
        for step in self._steps:
            yield from _first(step)
        for prompt in self._waiting[:LOOKAHEAD]:
            yield from _first(prompt)
        for number, prompt in enumerate(self._waiting):
            yield from _others(prompt)
            behind = self._waiting[number + LOOKAHEAD : number + LOOKAHEAD + 1]
            yield from itertools.chain.from_iterable(map(_first, behind))
        yield from sorted(
            (c for p in self._served for c in p.completions if not c.finished), key=self.urgency
        )

    def urgency(self, completion: Completion) -> Urgency:
        """Sort key of an unfinished completion in the order of `urgent`; O(log n) in the queue."""
        prompt, is_other = completion.prompt, completion.kind is Kind.OTHER
        if prompt in self._steps:
            return (0, self._steps[prompt], completion.index)
        if prompt in self._served:
            size = len(completion.token_ids)
            return (3, is_other, size, self._served[prompt], completion.index)
        number = self._number_of(prompt)
        if is_other:
            return (2, number, 0, completion.index)
        if number < LOOKAHEAD:
            return (1, number, completion.index)
        return (2, number - LOOKAHEAD, 1, completion.index)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue is in order and has each completion once."""
        urgent = list(self.urgent())
        assert len(urgent) == len(set(urgent)), "queued twice"
        order = [self.urgency(completion) for completion in urgent]
        assert order == sorted(order), "two orders"
        places = [self._places[prompt] for prompt in self._waiting]
        assert places == sorted(places), "the queue is out of order"
        assert places == [prompt.place for prompt in self._waiting], "at another's place"
        assert len(places) == len(self._places), "a place is held for nobody"

    def _number_of(self, prompt: Prompt) -> int:
        """How many waiting prompts stand before this one."""
        place = self._places[prompt]
        return bisect.bisect_left(self._waiting, place, key=self._places.__getitem__)


def _first(prompt: Prompt) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is not Kind.OTHER]


def _others(prompt: Prompt) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is Kind.OTHER]
