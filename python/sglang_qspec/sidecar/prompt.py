"""A text that is being drafted on: its completions, and the requests that get them."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    MAX_DRAFTED_TOKENS,
    MAX_DRAWN_TOKENS,
    Candidates,
    Drafted,
    SeededSampling,
    Submit,
)
from sglang_qspec.sidecar.sampling import GREEDY, Sampling, seed_of

Subscriber = tuple[Peer, int]
"""A server and the number of its submission."""
PromptKey = tuple[Hashable, ...]
Place = tuple[tuple[int, int], int]
"""Where a request stands in the queue: its rank, then its arrival at the sidecar. The smallest is
served first."""

MAX_PROMPT_COMPLETIONS = MAX_COMPLETIONS
"""Maximum number of completions that one prompt has at a time. Sampled requests beyond this number
get completions of other requests until one of their own becomes possible."""
CROWD = 64
"""Requests that get a completion, from which on most of them get it in one piece."""


def tokens_of(token_ids: Sequence[int]) -> array[int]:
    """Token ids at four bytes each; a list takes up to 36."""
    return array("i", token_ids)


class Kind(Enum):
    """What a completion is for."""

    STEP = auto()
    """It continues what a request that is served has committed."""
    FIRST = auto()
    """Its target is likeliest to follow it."""
    OTHER = auto()


@dataclass(eq=False, slots=True)
class Share:
    """One completion as one request gets it."""

    completion: Completion
    number: int
    """Number of the completion in the messages to this request; 0 is drawn with the request's own
    seed, or greedy."""
    sent: int = 0
    """Tokens sent."""
    told_finished: bool = False
    outrun: bool = False
    """The request has committed more tokens than the completion had."""


@dataclass(eq=False, slots=True)
class Completion:
    """One continuation of a prompt, as far as it is drafted."""

    prompt: Prompt
    index: int
    """A number that no other completion of the prompt ever has; the first one's is 0."""
    sampling: Sampling | SeededSampling
    seed: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    candidates: list[Candidates] = field(default_factory=list)
    """What the tokens were drawn from that are not sent yet, where the target wants to know.
    Only step drafts have any, and a step draft has one subscriber."""
    row: int | None = None
    """Its KV row, which covers a prefix of the prompt and `token_ids`."""
    finished: bool = False
    shares: dict[Subscriber, Share] = field(default_factory=dict)
    """The requests that get it. A completion without any is dropped."""
    useful_to: int = 0
    """Requests among them that have not outrun it."""

    def __len__(self) -> int:
        """Tokens of the prompt and the completion."""
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def kind(self) -> Kind:
        if self.prompt.parent is not None:
            return Kind.STEP
        likely = self.index == 0 or isinstance(self.sampling, SeededSampling)
        return Kind.FIRST if likely else Kind.OTHER

    @property
    def position(self) -> int:
        """What its next draw depends on besides its seed."""
        # The target numbers its draws by the position of the token before.
        return len(self) - 1 if isinstance(self.sampling, SeededSampling) else len(self.token_ids)

    def tail(self, start: int, count: int) -> list[int]:
        """At most `count` tokens of prompt and completion from position `start` on."""
        prompt = self.prompt.token_ids
        tokens = prompt[start : start + count]
        after = max(0, start - len(prompt))
        return (tokens + self.token_ids[after : after + count - len(tokens)]).tolist()

    def give_to(self, subscriber: Subscriber, number: int) -> Share:
        """Let a request have the completion under this number."""
        share = self.shares[subscriber] = Share(self, number)
        self.useful_to += 1
        return share

    def outran(self, share: Share) -> bool:
        """Note that a request has outrun the completion; whether all its requests have."""
        if not share.outrun:
            share.outrun = True
            self.useful_to -= 1
        return self.useful_to == 0


@dataclass(eq=False, slots=True)
class Subscription:
    """What one request gets of a prompt's completions, and how far the request is itself."""

    base_len: int
    place: Place | None
    """None: it is served already."""
    seeded: SeededSampling | None = None
    """How its step drafts are drawn; None takes the likeliest tokens."""
    shares: list[Share] = field(default_factory=list)
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    """Committed behind `base_len`, as far as its server has told."""
    step_draft: Prompt | None = None
    """The prompt with its output, as far as it was committed when this was begun."""
    step_drafts: int = 0
    """How many there have been."""

    @property
    def known_len(self) -> int:
        """Committed output, as far as its server has told."""
        return self.base_len + len(self.output_ids)

    @property
    def busy(self) -> bool:
        """Whether more is to be drafted for the request before its next commit."""
        step = self.step_draft
        unfinished = any(not share.completion.finished for share in self.shares)
        return unfinished or (step is not None and not step.finished)


class Prompt:
    """One prompt with its completions, shared by all requests with an equal `PromptKey`.

    A request gets at most as many completions as it asks for. Each belongs to the requests that
    get it, and is dropped with the last of them. So neither the number of requests that come and
    go, nor that of the requests that there are, makes a submission or a delivery slower.

    A request with dice is likeliest to follow a completion that is drawn with them. It gets one, in
    place of another that was not begun yet, and gets those of its siblings for its others: n
    requests for a prompt have n completions drafted in all. At most `MAX_PROMPT_COMPLETIONS` exist
    at a time; where one is dropped, the request that has waited longest for its own begins it.
    """

    def __init__(
        self,
        key: PromptKey,
        token_ids: array[int],
        stops: frozenset[int],
        limit: int,
        samplings: Sequence[Sampling | SeededSampling],
        *,
        owner: Peer,
        parent: Prompt | None = None,
        number: int = 0,
    ) -> None:
        """`stops` end a completion, and so do `limit` tokens. There is one for each of `samplings`,
        and the first has the number `number` on the wire. `owner` is the server for which the
        prompt counts. A step draft has the prompt that it goes on from as its `parent`."""
        self.key = key
        self.token_ids = token_ids
        self.stops = stops
        self.limit = limit
        self.owner = owner
        self.parent = parent
        self.number = number
        self.row: int | None = None
        """A KV row that is kept for the prompt."""
        self.row_text: Completion | None = None
        """The completion whose text the kept row holds; it may have been dropped since."""
        self.completions: list[Completion] = []
        self.subscriptions: dict[Subscriber, Subscription] = {}
        self._count = 0
        """Completions that there have been."""
        self._wanted = len(samplings)
        """Completions that each request gets."""
        self._drawn = bool(samplings) and isinstance(samplings[0], SeededSampling)
        """Whether each request follows a completion of its own."""
        self._without_own: dict[Subscriber, None] = {}
        """Requests that follow none of their own, as the prompt has too many; the oldest first."""
        self._places: list[tuple[Place, Subscriber]] = []
        """A heap of the places of requests that wait, and of some that wait no longer."""
        for sampling in samplings:
            self._add(sampling)

    @classmethod
    def submitted(
        cls, key: PromptKey, submit: Submit, stops: frozenset[int], limit: int, owner: Peer
    ) -> Prompt:
        """The prompt of a request, with the completions that it asks for."""
        count = min(submit.completions, MAX_COMPLETIONS)
        samplings: list[Sampling | SeededSampling] = [
            Sampling(submit.temperature, submit.top_p)
        ] * count
        if submit.greedy_first:
            samplings[:1] = [_likely(submit)] * len(samplings[:1])
        return cls(key, tokens_of(submit.token_ids), stops, limit, samplings, owner=owner)

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.completions)

    @property
    def place(self) -> Place | None:
        """Smallest place among the requests that wait; None if no request waits."""
        while self._places:
            place, subscriber = self._places[0]
            subscription = self.subscriptions.get(subscriber)
            if subscription is not None and subscription.place == place:
                return place
            heapq.heappop(self._places)
        return None

    def stepping(self, subscriber: Subscriber) -> bool:
        """Whether a step draft for one of its requests is being drafted on."""
        step = self.subscriptions[subscriber].step_draft
        return step is not None and not step.finished

    def subscribe(
        self,
        subscriber: Subscriber,
        base_len: int,
        place: Place | None,
        seeded: SeededSampling | None = None,
    ) -> None:
        """Let a request have completions: one of its own if it draws, and the oldest others."""
        subscription = Subscription(base_len, place, seeded)
        self.subscriptions[subscriber] = subscription
        own = self._own(seeded) if self._drawn and seeded is not None else None
        if own is not None:
            subscription.shares.append(own.give_to(subscriber, 0))
        elif self._drawn:
            self._without_own[subscriber] = None
        first = int(self._drawn)
        others = (completion for completion in self.completions if completion is not own)
        for number, completion in zip(range(first, self._wanted), others, strict=False):
            subscription.shares.append(completion.give_to(subscriber, number))
        if place is not None:
            self._note_place(place, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> tuple[Subscription, list[Completion]]:
        """End a request; also returns the completions that no request gets any more."""
        subscription = self.subscriptions.pop(subscriber)
        self._without_own.pop(subscriber, None)
        dropped = []
        for share in subscription.shares:
            completion = share.completion
            del completion.shares[subscriber]
            completion.useful_to -= not share.outrun
            if not completion.shares:
                self.completions.remove(completion)
                dropped.append(completion)
        return subscription, dropped

    def serve_own(self) -> list[Completion]:
        """Begin completions for requests that have none of their own, as far as there is room."""
        begun = []
        while self._without_own and len(self.completions) < MAX_PROMPT_COMPLETIONS:
            subscriber = next(iter(self._without_own))
            del self._without_own[subscriber]
            subscription = self.subscriptions[subscriber]
            if subscription.seeded is not None and subscription.place is not None:
                completion = self._add(subscription.seeded)
                subscription.shares.insert(0, completion.give_to(subscriber, 0))
                begun.append(completion)
        return begun

    def news(self, completion: Completion) -> Iterator[tuple[Peer, Drafted]]:
        """What the requests have not been sent of one completion; it counts as sent now.

        A completion that many requests get is sent in pieces only to those that it is drawn for,
        and to the others when it is finished.
        """
        crowded = len(completion.shares) > CROWD and not completion.finished
        for subscriber, share in completion.shares.items():
            if share.number == 0 or not crowded:
                yield from self.news_for(subscriber, share)

    def news_for(self, subscriber: Subscriber, share: Share) -> Iterator[tuple[Peer, Drafted]]:
        """What one request has not been sent of a completion, in messages of the allowed size."""
        completion = share.completion
        end = len(completion.token_ids)
        most = MAX_DRAWN_TOKENS if completion.candidates else MAX_DRAFTED_TOKENS
        peer, submission = subscriber
        while share.sent < end or (completion.finished and not share.told_finished):
            start, share.sent = share.sent, min(share.sent + most, end)
            share.told_finished = completion.finished and share.sent == end
            drafted = Drafted(
                submission=submission,
                completion=self.number + share.number,
                base_len=self.subscriptions[subscriber].base_len,
                start=start,
                token_ids=completion.token_ids[start : share.sent].tolist(),
                finished=share.told_finished,
                known_len=self._known_len(subscriber),
                candidates=completion.candidates[: share.sent - start],
            )
            del completion.candidates[: share.sent - start]
            yield peer, drafted

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests and completions name each other."""
        for completion in self.completions:
            assert completion.shares, "a completion that nobody gets"
            assert completion.useful_to == sum(not s.outrun for s in completion.shares.values())
            for subscriber, share in completion.shares.items():
                assert share.completion is completion
                assert share in self.subscriptions[subscriber].shares, "a share of nobody"
        for subscriber, subscription in self.subscriptions.items():
            numbers = [share.number for share in subscription.shares]
            assert len(set(numbers)) == len(numbers) <= self._wanted, "numbers used twice"
            assert all(subscriber in s.completion.shares for s in subscription.shares)
        assert len(self.completions) <= MAX_PROMPT_COMPLETIONS

    def _own(self, seeded: SeededSampling) -> Completion | None:
        """The completion for a request with these dice; None if the prompt has too many."""
        for completion in self.completions:
            if completion.sampling == seeded:
                return completion
        for completion in reversed(self.completions):
            if completion.kind is Kind.OTHER and not (completion.token_ids or completion.finished):
                completion.sampling, completion.seed = seeded, seeded.seed
                return completion
        if len(self.completions) >= MAX_PROMPT_COMPLETIONS:
            return None
        return self._add(seeded)

    def _add(self, sampling: Sampling | SeededSampling) -> Completion:
        if isinstance(sampling, SeededSampling):
            seed = sampling.seed
        elif sampling == GREEDY:
            seed = 0
        else:
            seed = seed_of(self.token_ids, self._count)
        completion = Completion(self, self._count, sampling, seed, finished=self.limit == 0)
        self._count += 1
        self.completions.append(completion)
        return completion

    def _note_place(self, place: Place, subscriber: Subscriber) -> None:
        if len(self._places) > 2 * len(self.subscriptions) + 16:
            self._places = [
                (subscription.place, each)
                for each, subscription in self.subscriptions.items()
                if subscription.place is not None and each != subscriber
            ]
            heapq.heapify(self._places)
        heapq.heappush(self._places, (place, subscriber))

    def _known_len(self, subscriber: Subscriber) -> int:
        """How far the output is of the request that this is a step draft for; 0 if it is none."""
        if self.parent is None:
            return 0
        return self.parent.subscriptions[subscriber].known_len


def prompt_key(submit: Submit, limit: int, sharers: Hashable) -> PromptKey:
    """Equal for requests that can share their completions.

    `sharers` is equal for servers that may share: by default each server for itself.
    """
    return (
        sharers,
        tokens_of(submit.token_ids).tobytes(),
        submit.completions,
        submit.temperature,
        submit.top_p,
        submit.greedy_first,
        isinstance(_likely(submit), SeededSampling),
        frozenset(submit.stop_token_ids),
        submit.ignore_eos,
        limit,
    )


def _likely(submit: Submit) -> Sampling | SeededSampling:
    """How the completion is chosen that its target is likeliest to follow."""
    return GREEDY if submit.seeded is None or submit.seeded.probabilities else submit.seeded
