"""A prompt that is being drafted: its completions, and the requests that want them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_qspec.link import Peer
from sglang_qspec.messages import Drafted, Submit
from sglang_qspec.sidecar.sampling import seed_of

Subscriber = tuple[Peer, str, int]
"""A server, and its request's rid and serial."""
MAX_COMPLETIONS = 64
"""Of one request; those over it are never drafted."""
PromptKey = tuple[Hashable, ...]


@dataclass(eq=False, slots=True)
class Completion:
    """One continuation of a prompt, as far as it is drafted."""

    prompt: Prompt
    index: int
    """0 is the greedy one."""
    temperature: float
    seed: int
    token_ids: list[int] = field(default_factory=list)
    row: int | None = None
    """Its KV row, which covers a prefix of the prompt and `token_ids`."""
    finished: bool = False

    def __len__(self) -> int:
        """Tokens of the prompt and the completion."""
        return len(self.prompt.token_ids) + len(self.token_ids)

    def tail(self, start: int, count: int) -> list[int]:
        """At most `count` tokens of prompt and completion from position `start` on."""
        prompt = self.prompt.token_ids
        tokens = prompt[start : start + count]
        after = max(0, start - len(prompt))
        return tokens + self.token_ids[after : after + count - len(tokens)]


@dataclass(eq=False, slots=True)
class Subscription:
    """What one request has been sent of a prompt's completions."""

    base_len: int
    sent: list[int]
    """Tokens sent, for each completion."""
    told_finished: list[bool]
    waits: bool = True
    """It is not served yet."""


class Prompt:
    """One prompt with its completions, shared by all requests that are equal in all of this."""

    def __init__(self, key: PromptKey, submit: Submit, stops: frozenset[int], limit: int) -> None:
        """`stops` end a completion, and so do `limit` tokens."""
        self.key = key
        self.token_ids = submit.token_ids
        self.stops = stops
        self.limit = limit
        self.row: int | None = None
        """A KV row that holds the prompt, for completions that have not started."""
        self.completions = [
            Completion(
                self,
                index,
                submit.temperature if index else 0.0,
                seed_of(submit.token_ids, index),
                finished=limit == 0,
            )
            for index in range(min(submit.completions, MAX_COMPLETIONS))
        ]
        self.subscriptions: dict[Subscriber, Subscription] = {}

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.completions)

    def subscribe(self, subscriber: Subscriber, base_len: int) -> None:
        count = len(self.completions)
        self.subscriptions[subscriber] = Subscription(base_len, [0] * count, [False] * count)

    def news(self, completion: Completion) -> list[tuple[Peer, Drafted]]:
        """What the subscribers have not been sent of one completion; it counts as sent now."""
        news = []
        index, end = completion.index, len(completion.token_ids)
        for (peer, rid, serial), subscription in self.subscriptions.items():
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
                        completion=index,
                        base_len=subscription.base_len,
                        start=start,
                        token_ids=completion.token_ids[start:end],
                        finished=completion.finished,
                    ),
                )
            )
        return news


def prompt_key(submit: Submit, limit: int) -> PromptKey:
    """Equal for requests that can share their completions."""
    return (
        tuple(submit.token_ids),
        submit.completions,
        submit.temperature,
        frozenset(submit.stop_token_ids),
        submit.ignore_eos,
        limit,
    )
