"""A text that is being drafted on: its completions, and the requests that want them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Candidates, Dice, Drafted, Submit
from sglang_qspec.sidecar.sampling import GREEDY, Sampling, seed_of

Subscriber = tuple[Peer, str, int]
"""A server, and its request's rid and serial."""
PromptKey = tuple[Hashable, ...]
Place = tuple[tuple[int, int], int]
"""Where a request stands in the queue: its rank, then its arrival at the sidecar. The smallest is
served first."""


class Kind(Enum):
    """What a completion is for."""

    STEP = auto()
    """It continues what a request that is served has committed."""
    FIRST = auto()
    """Its target is likeliest to follow it."""
    OTHER = auto()


@dataclass(eq=False, slots=True)
class Completion:
    """One continuation of a prompt, as far as it is drafted."""

    prompt: Prompt
    index: int
    """Its place in `prompt.completions`."""
    sampling: Sampling | Dice
    seed: int
    token_ids: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    """What each of them was drawn from, where its target wants to know; otherwise empty."""
    row: int | None = None
    """Its KV row, which covers a prefix of the prompt and `token_ids`."""
    finished: bool = False

    def __len__(self) -> int:
        """Tokens of the prompt and the completion."""
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def kind(self) -> Kind:
        if self.prompt.parent is not None:
            return Kind.STEP
        likely = self.index == 0 or isinstance(self.sampling, Dice)
        return Kind.FIRST if likely else Kind.OTHER

    @property
    def position(self) -> int:
        """What its next draw depends on besides its seed."""
        # The target numbers its draws by the position of the token before.
        return len(self) - 1 if isinstance(self.sampling, Dice) else len(self.token_ids)

    def tail(self, start: int, count: int) -> list[int]:
        """At most `count` tokens of prompt and completion from position `start` on."""
        prompt = self.prompt.token_ids
        tokens = prompt[start : start + count]
        after = max(0, start - len(prompt))
        return tokens + self.token_ids[after : after + count - len(tokens)]


@dataclass(eq=False, slots=True)
class Subscription:
    """What one request has been sent of a prompt's completions, and how far it is itself."""

    base_len: int
    sent: list[int]
    """Tokens sent, for each completion."""
    told_finished: list[bool]
    place: Place | None
    """None: it is served already."""
    own: int = 0
    """The index of the completion that this request is likeliest to follow."""
    dice: Dice | None = None
    """How its step drafts are drawn; None takes the likeliest tokens."""
    output_ids: list[int] = field(default_factory=list)
    """Committed behind `base_len`, as far as its server has told."""
    step_draft: Prompt | None = None
    """The prompt with its output, as far as it was committed when this was begun."""
    step_drafts: int = 0
    """How many there have been."""

    @property
    def known_len(self) -> int:
        """Committed output, as far as its server has told."""
        return self.base_len + len(self.output_ids)

    def number(self, index: int) -> int:
        """What the completion is called on the wire, where a request's own comes first."""
        if index == self.own:
            return 0
        return index or self.own


class Prompt:
    """One prompt with its completions, shared by all requests that are equal in all of this.

    Requests with dice are likeliest to follow a completion that is drawn with theirs. Each gets
    one, in place of another that was not begun yet, and has those of its siblings for its others: n
    answers to a prompt are drafted for at the price of one.
    """

    def __init__(
        self,
        key: PromptKey,
        token_ids: list[int],
        stops: frozenset[int],
        limit: int,
        samplings: Sequence[Sampling | Dice],
        *,
        parent: Prompt | None = None,
        number: int = 0,
    ) -> None:
        """`stops` end a completion, and so do `limit` tokens. There is one for each of `samplings`,
        and the first has the number `number` on the wire. A step draft has the prompt that it goes
        on from as its `parent`."""
        self.key = key
        self.token_ids = token_ids
        self.stops = stops
        self.limit = limit
        self.parent = parent
        self.number = number
        self.row: int | None = None
        """A KV row that holds the prompt and maybe the beginning of its first completion."""
        self._wanted = len(samplings)
        """Completions that each request gets."""
        self.completions = [
            Completion(
                self,
                index,
                sampling,
                sampling.seed if isinstance(sampling, Dice) else seed_of(token_ids, index),
                finished=limit == 0,
            )
            for index, sampling in enumerate(samplings)
        ]
        self.subscriptions: dict[Subscriber, Subscription] = {}

    @classmethod
    def submitted(cls, key: PromptKey, submit: Submit, stops: frozenset[int], limit: int) -> Prompt:
        """The prompt of a request, with the completions that it asks for."""
        count = min(submit.completions, MAX_COMPLETIONS)
        samplings: list[Sampling | Dice] = [Sampling(submit.temperature, submit.top_p)] * count
        if submit.greedy_first:
            samplings[:1] = [_likely(submit)] * len(samplings[:1])
        return cls(key, submit.token_ids, stops, limit, samplings)

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.completions)

    @property
    def place(self) -> Place | None:
        """That of the request that is served first of those that wait; None if none does."""
        places = (s.place for s in self.subscriptions.values() if s.place is not None)
        return min(places, default=None)

    def stepping(self, subscriber: Subscriber) -> bool:
        """Whether a step draft for one of its requests is being drafted on."""
        step = self.subscriptions[subscriber].step_draft
        return step is not None and not step.finished

    def overtaken(self) -> list[Completion]:
        """Unfinished completions that all its requests have outrun; only served ones outrun any."""
        behind = min(
            (len(s.output_ids) if s.place is None else 0 for s in self.subscriptions.values()),
            default=0,
        )
        return [c for c in self.completions if not c.finished and len(c.token_ids) < behind]

    def subscribe(
        self,
        subscriber: Subscriber,
        base_len: int,
        place: Place | None,
        dice: Dice | None = None,
    ) -> None:
        own = self._own(dice)
        count = len(self.completions)
        self.subscriptions[subscriber] = Subscription(
            base_len, [0] * count, [False] * count, place, own, dice
        )

    def _own(self, dice: Dice | None) -> int:
        """The completion for a request with these dice."""
        if self.limit == 0 or not self.completions or dice is None:
            return 0
        if not isinstance(self.completions[0].sampling, Dice):
            return 0
        for completion in self.completions:
            if completion.sampling == dice:
                return completion.index
        for completion in reversed(self.completions):
            if completion.kind is Kind.OTHER and not (completion.token_ids or completion.finished):
                completion.sampling, completion.seed = dice, dice.seed
                return completion.index
        self.completions.append(Completion(self, len(self.completions), dice, dice.seed))
        for subscription in self.subscriptions.values():
            subscription.sent.append(0)
            subscription.told_finished.append(False)
        return self.completions[-1].index

    def news(self, completion: Completion) -> list[tuple[Peer, Drafted]]:
        """What the subscribers have not been sent of one completion; it counts as sent now."""
        news = []
        index, end = completion.index, len(completion.token_ids)
        for (peer, rid, serial), subscription in self.subscriptions.items():
            number = subscription.number(index)
            if number >= self._wanted:
                continue
            start = subscription.sent[index]
            if start == end and subscription.told_finished[index] == completion.finished:
                continue
            subscription.sent[index] = end
            subscription.told_finished[index] = completion.finished
            news.append(
                (
                    peer,
                    Drafted(
                        rid=rid,
                        serial=serial,
                        completion=self.number + number,
                        base_len=subscription.base_len,
                        start=start,
                        token_ids=completion.token_ids[start:end],
                        finished=completion.finished,
                        known_len=self._known_len((peer, rid, serial)),
                        candidates=completion.candidates[start:end],
                    ),
                )
            )
        return news

    def _known_len(self, subscriber: Subscriber) -> int:
        """How far the output is of the request that this is a step draft for; 0 if it is none."""
        if self.parent is None:
            return 0
        return self.parent.subscriptions[subscriber].known_len


def prompt_key(submit: Submit, limit: int) -> PromptKey:
    """Equal for requests that can share their completions."""
    return (
        tuple(submit.token_ids),
        submit.completions,
        submit.temperature,
        submit.top_p,
        submit.greedy_first,
        isinstance(_likely(submit), Dice),
        frozenset(submit.stop_token_ids),
        submit.ignore_eos,
        limit,
    )


def _likely(submit: Submit) -> Sampling | Dice:
    """How the completion is chosen that its target is likeliest to follow."""
    return GREEDY if submit.dice is None or submit.dice.probabilities else submit.dice
