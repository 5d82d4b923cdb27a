"""One server's unfinished completions, ordered by urgency."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from sglang_qspec.policy.draft_worth import DraftWorth
from sglang_qspec.sidecar.subscription import StepDraft
from sglang_qspec.sidecar.text import Completion, Kind, Place, Text

PROMPTS_AHEAD = 64
"""Number of waiting prompts that get their first completions before any prompt gets its other
completions."""

SAMPLE = 8
"""Number of completions by which `worthiest` judges a kind of work."""

Urgency = tuple[int, ...]
"""Sort key of a completion: the smallest is the most urgent."""


class DraftQueue:
    """Order in which the drafter works on the prompts of one server.

    Waiting prompts are in the order in which the server will serve them; finished prompts are
    removed. The order of work, by urgency, is:

    1. step drafts, the oldest first, because a target is about to verify them,
    2. the first completions of the next PROMPTS_AHEAD prompts, because a first completion is worth
       more than all other completions of a prompt,
    3. the other completions of the next prompt, then the first completion of the prompt
       PROMPTS_AHEAD places behind it, and so on down the queue,
    4. unfinished completions of prompts that are already served, the shortest first.

    A prompt that is served soon thus gets all its completions while prompts far behind have none.
    If the drafter is slower than the server, each prompt still gets its first completion. `worth`
    may put one of these kinds of work before the others.
    """

    def __init__(self) -> None:
        self.worth = DraftWorth()
        """What draft tokens are worth to this server."""
        self.seconds = 0.0
        """Virtual drafting time of this server in seconds, as `FairQueue` charges it."""
        self._waiting: list[Text] = []
        self._places: dict[Text, Place] = {}
        """Place of each waiting prompt, the sort key of `_waiting`."""
        self._served: dict[Text, int] = {}
        self._steps: dict[Text, int] = {}
        """Step drafts, and the order in which they were queued."""
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._served or self._steps)

    def __contains__(self, text: Text) -> bool:
        return text in self._places or text in self._served or text in self._steps

    def arrange(self, prompt: Text) -> None:
        """Queue a prompt at its place again, after its requests have changed."""
        self.remove(prompt)
        if prompt.finished:
            return
        place = prompt.place
        if place is None:
            self._served[prompt] = next(self._numbers)
        else:
            self._places[prompt] = place
            bisect.insort(self._waiting, prompt, key=self._places.__getitem__)

    def begin(self, step: StepDraft) -> None:
        """Queue a step draft behind the queued ones."""
        if not step.finished:
            self._steps.setdefault(step, next(self._numbers))

    def remove(self, text: Text) -> None:
        """Remove a prompt or step draft from the queue, if it is queued."""
        if text in self._places:
            del self._waiting[self._number_of(text)]
            del self._places[text]
        self._served.pop(text, None)
        self._steps.pop(text, None)

    def urgent(self) -> Iterator[Completion]:
        """All unfinished completions, the most urgent first."""
        kinds = (self._step_drafts(), self._firsts(), self._others(), self._of_served())
        return itertools.chain.from_iterable(kinds)

    def worthiest(self) -> Iterator[Completion]:
        """As `urgent`, with the kind of work that is worth most to the server first.

        What the next token of a completion is worth decides, at the best of SAMPLE completions of
        each kind.
        """
        kinds = [
            (self._value(self._step_drafts()), self._step_drafts()),
            (self._value(self._firsts()), self._firsts()),
            (self._value(self._others()), self._others()),
            (self._value(self._unsorted()), self._of_served()),
        ]
        kinds.sort(key=lambda pair: -pair[0])
        return itertools.chain.from_iterable(completions for _, completions in kinds)

    def _value(self, completions: Iterator[Completion]) -> float:
        sample = itertools.islice(completions, SAMPLE)
        return max((self.worth.value(*each.aim) for each in sample), default=0.0)

    def _step_drafts(self) -> Iterator[Completion]:
        return itertools.chain.from_iterable(map(_first, self._steps))

    def _firsts(self) -> Iterator[Completion]:
        """The first completions of the next prompts."""
        return itertools.chain.from_iterable(map(_first, self._waiting[:PROMPTS_AHEAD]))

    def _others(self) -> Iterator[Completion]:
        """The other completions of waiting prompts, and the first ones of those far behind."""
        for number, prompt in enumerate(self._waiting):
            yield from _others(prompt)
            behind = self._waiting[number + PROMPTS_AHEAD : number + PROMPTS_AHEAD + 1]
            yield from itertools.chain.from_iterable(map(_first, behind))

    def _of_served(self) -> Iterator[Completion]:
        """The completions of served prompts, the shortest first."""
        yield from sorted(self._unsorted(), key=self.urgency)

    def _unsorted(self) -> Iterator[Completion]:
        return (c for prompt in self._served for c in prompt.completions if not c.finished)

    def urgency(self, completion: Completion) -> Urgency:
        """Sort key of an unfinished completion in the order of `urgent`; O(log n) in the queue."""
        prompt, is_other = completion.text, completion.kind is Kind.OTHER
        if prompt in self._steps:
            return (0, self._steps[prompt], completion.index)
        if prompt in self._served:
            size = len(completion.token_ids)
            return (3, is_other, size, self._served[prompt], completion.index)
        number = self._number_of(prompt)
        if is_other:
            return (2, number, 0, completion.index)
        if number < PROMPTS_AHEAD:
            return (1, number, completion.index)
        return (2, number - PROMPTS_AHEAD, 1, completion.index)

    def urgent_tokens(self, typical: float) -> float:
        """Number of tokens that the unfinished step drafts and first completions still need.

        `typical` is the expected length of a first completion. The prompts behind the next
        PROMPTS_AHEAD count as much as these on average, so a long queue costs no time.
        """
        steps = sum(step.limit - len(step.completions[0].token_ids) for step in self._steps)
        ahead = self._waiting[:PROMPTS_AHEAD]
        firsts = sum(
            max(1.0, min(completion.text.limit, typical) - len(completion.token_ids))
            for prompt in ahead
            for completion in _first(prompt)
        )
        return steps + firsts * len(self._waiting) / max(1, len(ahead))

    def is_far_back(self, place: Place) -> bool:
        """Whether PROMPTS_AHEAD waiting prompts come before this place."""
        if len(self._waiting) < PROMPTS_AHEAD:
            return False
        return self._places[self._waiting[PROMPTS_AHEAD - 1]] < place

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue is in order and has each completion once."""
        urgent = list(self.urgent())
        assert len(urgent) == len(set(urgent)), "a completion is queued twice"
        order = [self.urgency(completion) for completion in urgent]
        assert order == sorted(order), "`urgent` and `urgency` disagree"
        places = [self._places[prompt] for prompt in self._waiting]
        assert places == sorted(places), "the queue is out of order"
        assert places == [prompt.place for prompt in self._waiting], (
            "a prompt is queued at an outdated place"
        )
        assert len(places) == len(self._places), "a place has no prompt"

    def _number_of(self, prompt: Text) -> int:
        """Number of waiting prompts before this one."""
        place = self._places[prompt]
        return bisect.bisect_left(self._waiting, place, key=self._places.__getitem__)


def _first(prompt: Text) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is not Kind.OTHER]


def _others(prompt: Text) -> list[Completion]:
    return [c for c in prompt.completions if not c.finished and c.kind is Kind.OTHER]
