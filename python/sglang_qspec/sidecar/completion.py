"""Owns the state of one completion: its tokens, KV row and subscribers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from sglang_qspec.messages import Candidates, SeededSampling
from sglang_qspec.sidecar.sampling import Sampling
from sglang_qspec.sidecar.subscription import Share, Subscriber

if TYPE_CHECKING:
    from sglang_qspec.sidecar.prompt import Prompt


class Kind(Enum):
    """Purpose of a completion."""

    STEP = auto()
    """A step draft, which continues the committed output of a served request."""
    FIRST = auto()
    """The completion that the target is most likely to agree with."""
    OTHER = auto()
    """Any other completion."""


@dataclass(eq=False, slots=True)
class Completion:
    """A drafted continuation of a prompt."""

    prompt: Prompt
    index: int
    """Number of the completion, never reused within the prompt; the first one has 0."""
    sampling: Sampling | SeededSampling
    seed: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    candidates: list[Candidates] = field(default_factory=list)
    """Candidates of the tokens that are not sent yet; empty unless it is a step draft for
    rejection sampling."""
    row: int | None = None
    """KV row, which covers a prefix of the prompt and `token_ids`; None without a row."""
    finished: bool = False
    """Whether no more tokens are drafted; a step draft may continue after a Commit."""
    shares: dict[Subscriber, Share] = field(default_factory=dict)
    """Deliveries by subscriber. A completion without subscribers is dropped."""
    useful_to: int = 0
    """Number of subscribers that have not outrun the completion."""

    def __len__(self) -> int:
        """Length of prompt and completion, in tokens."""
        return len(self.prompt.token_ids) + len(self.token_ids)

    @property
    def kind(self) -> Kind:
        if self.prompt.parent is not None:
            return Kind.STEP
        likely = self.index == 0 or isinstance(self.sampling, SeededSampling)
        return Kind.FIRST if likely else Kind.OTHER

    @property
    def position(self) -> int:
        """Position from which, with the seed, the next random number is derived."""
        # The target derives it from the position of the previous token in the text.
        return len(self) - 1 if isinstance(self.sampling, SeededSampling) else len(self.token_ids)

    def tail(self, start: int, count: int) -> list[int]:
        """Return at most `count` tokens of prompt and completion from position `start` on."""
        prompt = self.prompt.token_ids
        tokens = prompt[start : start + count]
        after = max(0, start - len(prompt))
        return (tokens + self.token_ids[after : after + count - len(tokens)]).tolist()

    def give_to(self, subscriber: Subscriber, number: int) -> Share:
        """Subscribe a request to the completion, under this number."""
        share = self.shares[subscriber] = Share(self, number)
        self.useful_to += 1
        return share

    def outran(self, share: Share) -> bool:
        """Mark the completion as outrun by a request; return whether all subscribers outran it."""
        if not share.outrun:
            share.outrun = True
            self.useful_to -= 1
        return self.useful_to == 0
