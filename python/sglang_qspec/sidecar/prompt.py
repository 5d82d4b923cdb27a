"""Owns the requests that share one prompt, and decides which completions each of them receives."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Hashable, Sequence

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import SeededSampling, Submit
from sglang_qspec.sidecar.sampling import GREEDY, Sampling
from sglang_qspec.sidecar.subscription import Subscription
from sglang_qspec.sidecar.text import Completion, Kind, Place, Subscriber, Text, tokens_of

PromptKey = tuple[Hashable, ...]
"""Key of a prompt, which `prompt_key` makes; requests with equal keys share their completions."""

MAX_PROMPT_COMPLETIONS = MAX_COMPLETIONS
"""Maximum number of completions of one prompt at a time. Sampled requests beyond this number share
completions of other requests until there is room for their own."""


class Prompt(Text):
    """One prompt with its completions, shared by all requests with an equal `PromptKey`.

    A request receives at most the number of completions that it asks for. A completion is dropped
    with its last subscriber. The cost of a submission or a delivery therefore does not grow with
    the number of requests.

    The target of a request with a sampling seed most likely agrees with a completion drawn with
    this seed. Each request with a seed gets its own completion, in place of a completion that was
    not begun yet, and shares the completions of the other requests. At most
    `MAX_PROMPT_COMPLETIONS` exist at a time. When one is dropped, the prompt begins a completion
    for the request that has waited longest for its own.
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
        scope: int = 0,
    ) -> None:
        """Create the prompt with one completion for each of `samplings`."""
        super().__init__(token_ids, stops, limit, owner=owner, scope=scope)
        self.key = key
        self.subscriptions: dict[Subscriber, Subscription] = {}
        self._wanted = len(samplings)
        """Number of completions for each request."""
        self._drawn = bool(samplings) and isinstance(samplings[0], SeededSampling)
        """Whether each request gets a completion drawn with its own seed."""
        self._without_own: dict[Subscriber, None] = {}
        """Requests without their own completion, because the prompt has too many; the oldest
        first."""
        self._places: list[tuple[Place, Subscriber]] = []
        """Heap of the places of waiting requests; outdated entries are removed lazily."""
        for sampling in samplings:
            self.begin(sampling)

    @classmethod
    def submitted(
        cls, key: PromptKey, submit: Submit, stops: frozenset[int], limit: int, owner: Peer
    ) -> Prompt:
        """Create the prompt of a Submit, with the completions that it asks for."""
        count = min(submit.completions, MAX_COMPLETIONS)
        samplings: list[Sampling | SeededSampling] = [
            Sampling(submit.temperature, submit.top_p)
        ] * count
        if submit.greedy_first:
            samplings[:1] = [_likely(submit)] * len(samplings[:1])
        token_ids = tokens_of(submit.token_ids)
        return cls(key, token_ids, stops, limit, samplings, owner=owner, scope=submit.scope)

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

    @property
    def committed(self) -> int:
        oldest = next(iter(self.subscriptions.values()), None)
        return len(self.token_ids) + (0 if oldest is None else len(oldest.output_ids))

    @property
    def subscribers(self) -> Collection[Subscriber]:
        return self.subscriptions.keys()

    def subscribe(
        self,
        subscriber: Subscriber,
        base_len: int,
        place: Place | None,
        seeded: SeededSampling | None = None,
    ) -> None:
        """Give a request its own completion if it has a sampling seed, and the oldest others."""
        subscription = Subscription(base_len, place, seeded)
        self.subscriptions[subscriber] = subscription
        own = self._own(seeded) if self._drawn and seeded is not None else None
        if own is not None:
            subscription.shares.append(own.give_to(subscriber, 0, base_len))
        elif self._drawn:
            self._without_own[subscriber] = None
        first = int(self._drawn)
        others = (completion for completion in self.completions if completion is not own)
        for number, completion in zip(range(first, self._wanted), others, strict=False):
            subscription.shares.append(completion.give_to(subscriber, number, base_len))
        if place is not None:
            self._note_place(place, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> tuple[Subscription, list[Completion]]:
        """Remove a request; return its subscription and the completions without subscribers."""
        subscription = self.subscriptions.pop(subscriber)
        self._without_own.pop(subscriber, None)
        dropped = []
        for share in subscription.shares:
            completion = share.completion
            completion.take_from(subscriber)
            if not completion.shares:
                self.completions.remove(completion)
                dropped.append(completion)
        return subscription, dropped

    def serve_own(self) -> None:
        """Begin completions for requests without their own, while there is room."""
        while self._without_own and len(self.completions) < MAX_PROMPT_COMPLETIONS:
            subscriber = next(iter(self._without_own))
            del self._without_own[subscriber]
            subscription = self.subscriptions[subscriber]
            if subscription.seeded is not None and subscription.place is not None:
                own = self.begin(subscription.seeded)
                subscription.shares.insert(0, own.give_to(subscriber, 0, subscription.base_len))

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests and completions are consistent."""
        for completion in self.completions:
            assert completion.shares, "a completion has no subscriber"
            assert completion.useful_to == sum(not s.outrun for s in completion.shares.values())
            for subscriber, share in completion.shares.items():
                assert share.completion is completion
                assert share in self.subscriptions[subscriber].shares, "a share has no subscriber"
        for subscriber, subscription in self.subscriptions.items():
            numbers = [share.number for share in subscription.shares]
            assert len(set(numbers)) == len(numbers) <= self._wanted, (
                "a number is used twice, or there are too many"
            )
            assert all(subscriber in s.completion.shares for s in subscription.shares)
        assert len(self.completions) <= MAX_PROMPT_COMPLETIONS

    def _own(self, seeded: SeededSampling) -> Completion | None:
        """The completion for this sampling seed; None if the prompt has too many completions."""
        for completion in self.completions:
            if completion.sampling == seeded:
                return completion
        for completion in reversed(self.completions):
            if completion.kind is Kind.OTHER and not (completion.token_ids or completion.finished):
                completion.kind = Kind.FIRST
                completion.sampling, completion.seed = seeded, seeded.seed
                return completion
        if len(self.completions) >= MAX_PROMPT_COMPLETIONS:
            return None
        return self.begin(seeded)

    def _note_place(self, place: Place, subscriber: Subscriber) -> None:
        if len(self._places) > 2 * len(self.subscriptions) + 16:
            self._places = [
                (subscription.place, each)
                for each, subscription in self.subscriptions.items()
                if subscription.place is not None and each != subscriber
            ]
            heapq.heapify(self._places)
        heapq.heappush(self._places, (place, subscriber))


def prompt_key(submit: Submit, limit: int, sharers: Hashable) -> PromptKey:
    """Key that is equal for requests that can share their completions.

    `sharers` is equal for servers that may share: one server, or all servers whose targets have the
    same token ids in common with the draft model. Requests of different scopes never
    share, although the draft model drafts the same tokens for equal texts.
    """
    return (
        sharers,
        submit.scope,
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
    """Sampling of the completion that the target is most likely to agree with."""
    return GREEDY if submit.seeded is None or submit.seeded.probabilities else submit.seeded
