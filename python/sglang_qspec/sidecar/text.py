"""Owns the state of one text that the drafter continues: its completions, and their deliveries."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    MAX_DRAFTED_TOKENS,
    MAX_DRAWN_TOKENS,
    Candidates,
    Drafted,
    SeededSampling,
)
from sglang_qspec.policy.draft_worth import DEEPEST, Purpose
from sglang_qspec.sidecar.sampling import GREEDY, Sampling, seed_of

CROWD = 64
"""Number of subscribers of a completion above which most of them receive it only once finished."""

Subscriber = tuple[Peer, int]
"""A server, and the number of one of its submissions: identifies a request."""
Place = tuple[tuple[int, int], int]
"""Place of a request in its server's queue: rank, then order of arrival at the sidecar. The server
serves the smallest place first."""


def tokens_of(token_ids: Sequence[int]) -> array[int]:
    """Pack token ids at four bytes each; a list takes up to 36 bytes each."""
    return array("i", token_ids)


class Aim(NamedTuple):
    """What a draft token is for."""

    purpose: Purpose
    position: int
    """Distance from the committed output, in tokens; for a waiting prompt, from its end."""

    def packed(self, count: int) -> bytes:
        """The aims of `count` tokens from this one on, one byte each."""
        return _packed(self.purpose, min(self.position, DEEPEST), count)

    @staticmethod
    @lru_cache
    def unpack(byte: int) -> Aim:
        """The aim of a byte of `packed`."""
        purpose, position = divmod(byte, DEEPEST + 1)
        return Aim(Purpose(purpose), position)


@lru_cache(maxsize=1024)
def _packed(purpose: Purpose, position: int, count: int) -> bytes:
    deepest = purpose * (DEEPEST + 1) + DEEPEST
    first = deepest - (DEEPEST - position)
    return bytes(range(first, min(first + count, deepest + 1))).ljust(count, bytes((deepest,)))


class Guess(NamedTuple):
    """What the draft model's own head expects as the next token."""

    token_id: int
    probability: float
    """That of the head, among the token ids that it knows."""


class Kind(Enum):
    """Purpose of a completion."""

    STEP = auto()
    """A step draft, which continues the committed output of a served request."""
    FIRST = auto()
    """The completion that the target is most likely to agree with."""
    OTHER = auto()
    """Any other completion."""


class Text:
    """A text with its completions: a `Prompt`, or the text that a `StepDraft` continues."""

    def __init__(
        self,
        token_ids: array[int],
        stops: frozenset[int],
        limit: int,
        *,
        owner: Peer,
        scope: int,
        parent: Text | None = None,
    ) -> None:
        """Create a text without completions.

        A completion ends after a token in `stops` or after `limit` tokens. The drafting time and
        memory count for the server `owner`, and `scope` is its number of the request's scope. For a
        step draft, `parent` is the prompt that the text begins with.
        """
        self.token_ids = token_ids
        self.stops = stops
        self.limit = limit
        self.owner = owner
        self.scope = scope
        self.parent = parent
        self.row: int | None = None
        """KV row that is kept for the text; None without one."""
        self.row_text: Completion | None = None
        """Completion with the text of the kept row, dropped or not; None without a row."""
        self.completions: list[Completion] = []
        self._count = 0
        """Number of completions created so far."""

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.completions)

    @property
    def place(self) -> Place | None:
        """Smallest place among the requests that wait for the text; None if no request waits."""
        return None

    @property
    def subscribers(self) -> Collection[Subscriber]:
        """The requests that the text is drafted for."""
        return {each for completion in self.completions for each in completion.shares}

    @property
    def committed(self) -> int:
        """Length of the prompt and of the output that the target of its oldest request has
        committed, in tokens."""
        return len(self.token_ids)

    @property
    def known_len(self) -> int:
        """For a step draft, length of its request's output that the sidecar has; otherwise 0."""
        return 0

    def begin(self, sampling: Sampling | SeededSampling) -> Completion:
        """Add a completion."""
        if isinstance(sampling, SeededSampling):
            seed = sampling.seed
        elif sampling == GREEDY:
            seed = 0
        else:
            seed = seed_of(self.token_ids, self._count)
        likely = self._count == 0 or isinstance(sampling, SeededSampling)
        kind = Kind.STEP if self.parent is not None else Kind.FIRST if likely else Kind.OTHER
        completion = Completion(self, self._count, kind, sampling, seed, finished=self.limit == 0)
        self._count += 1
        self.completions.append(completion)
        return completion


@dataclass(eq=False, slots=True)
class Completion:
    """A drafted continuation of a text."""

    text: Text
    index: int
    """Number of the completion, never reused within the text; the first one has 0."""
    kind: Kind
    sampling: Sampling | SeededSampling
    seed: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    aims: array[int] = field(default_factory=lambda: array("B"))
    """`Aim` of each token when it was drafted, packed."""
    candidates: list[Candidates] = field(default_factory=list)
    """Candidates of the tokens that are not sent yet; empty unless it is a step draft for
    rejection sampling."""
    second_ids: list[int] = field(default_factory=list)
    """Second likeliest tokens in place of those that are not sent yet; empty unless it is a greedy
    step draft."""
    row: int | None = None
    """KV row, which covers a prefix of the text and `token_ids`; None without a row."""
    finished: bool = False
    """Whether no more tokens are drafted; a step draft may continue after a Commit."""
    guess: Guess | None = None
    """The token expected behind the newest one; None without a head."""
    shares: dict[Subscriber, Share] = field(default_factory=dict)
    """Deliveries by subscriber. A completion without subscribers is dropped."""
    useful_to: int = 0
    """Number of subscribers that have not outrun the completion."""

    def __len__(self) -> int:
        """Length of text and completion, in tokens."""
        return len(self.text.token_ids) + len(self.token_ids)

    @property
    def aim(self) -> Aim:
        """What the next token is for."""
        text = self.text
        if text.parent is not None:
            return Aim(Purpose.STEP, max(0, len(self) - text.committed))
        if text.place is not None:
            purpose = Purpose.FIRST if self.kind is Kind.FIRST else Purpose.OTHER
            return Aim(purpose, len(self.token_ids))
        return Aim(Purpose.SERVED, max(0, len(self) - text.committed))

    @property
    def position(self) -> int:
        """Position from which, with the seed, the next random number is derived."""
        # The target derives it from the position of the previous token in the text.
        return len(self) - 1 if isinstance(self.sampling, SeededSampling) else len(self.token_ids)

    @property
    def last(self) -> int:
        """The last token of text and completion."""
        return self.token_ids[-1] if self.token_ids else self.text.token_ids[-1]

    def tail(self, start: int, count: int) -> list[int]:
        """Return at most `count` tokens of text and completion from position `start` on."""
        text = self.text.token_ids
        tokens = text[start : start + count]
        after = max(0, start - len(text))
        return (tokens + self.token_ids[after : after + count - len(tokens)]).tolist()

    def give_to(self, subscriber: Subscriber, number: int, base_len: int) -> Share:
        """Subscribe a request to the completion; `Share` describes the arguments."""
        share = self.shares[subscriber] = Share(self, subscriber, number, base_len)
        self.useful_to += 1
        return share

    def take_from(self, subscriber: Subscriber) -> None:
        """Unsubscribe a request."""
        share = self.shares.pop(subscriber)
        self.useful_to -= not share.outrun

    def news(self) -> list[tuple[Peer, Drafted]]:
        """Return messages with the unsent tokens, and count these as sent.

        If more than CROWD requests receive the completion, only the request that it is drawn for
        gets it in pieces. The other requests get it once it is finished.
        """
        crowded = len(self.shares) > CROWD and not self.finished
        found: list[tuple[Peer, Drafted]] = []
        for share in self.shares.values():
            if share.number == 0 or not crowded:
                found += share.news()
        return found


@dataclass(eq=False, slots=True)
class Share:
    """Delivery of one completion to one request."""

    completion: Completion
    subscriber: Subscriber
    number: int
    """Number of the completion in messages to this request; 0 is the greedy one, or the one drawn
    with the request's own seed."""
    base_len: int
    """Length of the request's committed output that the completion continues, in tokens."""
    sent: int = 0
    """Number of tokens sent."""
    finished_sent: bool = False
    """Whether a message with `finished` was sent."""
    outrun: bool = False
    """Whether the request's committed output was longer than the unfinished completion."""

    def news(self) -> Iterator[tuple[Peer, Drafted]]:
        """Return messages of allowed size with the tokens not yet sent, and count these as sent."""
        completion = self.completion
        end = len(completion.token_ids)
        most = MAX_DRAWN_TOKENS if completion.candidates else MAX_DRAFTED_TOKENS
        peer, submission = self.subscriber
        while self.sent < end or (completion.finished and not self.finished_sent):
            start, self.sent = self.sent, min(self.sent + most, end)
            second_ids = completion.second_ids[: self.sent - start]
            self.finished_sent = completion.finished and self.sent == end
            drafted = Drafted(
                submission=submission,
                completion=self.number,
                base_len=self.base_len,
                start=start,
                token_ids=completion.token_ids[start : self.sent].tolist(),
                finished=self.finished_sent,
                known_len=completion.text.known_len,
                candidates=completion.candidates[: self.sent - start],
                second_ids=second_ids if len(second_ids) == self.sent - start else [],
            )
            del completion.candidates[: self.sent - start]
            del completion.second_ids[: self.sent - start]
            yield peer, drafted

    def fall_behind(self) -> bool:
        """Note that the request has outrun the completion. Returns whether all requests have."""
        if not self.outrun:
            self.outrun = True
            self.completion.useful_to -= 1
        return self.completion.useful_to == 0
