"""Owns the draft queues of all servers, and divides the drafting time among them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from sglang_qspec.link import Peer
from sglang_qspec.policy.draft_worth import DraftWorth
from sglang_qspec.sidecar.draft_queue import DraftQueue, Urgency
from sglang_qspec.sidecar.prompt import Prompt, PromptKey
from sglang_qspec.sidecar.subscription import StepDraft
from sglang_qspec.sidecar.text import Completion, Place, Text


class FairQueue:
    """Owns all subscribed prompts, and divides the drafting time among the servers.

    Each server has its own `DraftQueue`. The server that has used the least drafting time comes
    first (start-time fair queueing, Goyal et al., 1996). A pass takes one completion of each server
    in turn. With `apart`, for a device where a larger pass is slower, all completions of a pass
    belong to one server. A server with many completions then does not slow down the passes of
    others.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self.prompts: dict[PromptKey, Prompt] = {}
        """Subscribed prompts by key, the oldest first."""
        self.live_steps: Counter[Peer] = Counter()
        """Number of requests with a step draft by server, including paused step drafts."""
        self._now = 0.0
        """Virtual time in seconds: the time of the first server in the latest pass. Never falls."""
        self._apart = apart
        self._queues: dict[Peer, DraftQueue] = {}
        self._owned: Counter[Peer] = Counter()
        """Number of prompts by server."""
        self._gone: set[Peer] = set()
        """Disconnected servers that own prompts with subscribers of other servers."""

    def __bool__(self) -> bool:
        return any(self._queues.values())

    def __contains__(self, text: Text) -> bool:
        """Whether the text has unfinished completions."""
        return text in self._queues.get(text.owner, ())

    def add(self, prompt: Prompt) -> None:
        """Queue the prompt's unfinished completions."""
        self.prompts[prompt.key] = prompt
        self._owned[prompt.owner] += 1
        self.arrange(prompt)

    def arrange(self, prompt: Prompt) -> None:
        """Requeue a prompt after its requests have changed."""
        self._woken(prompt.owner).arrange(prompt)

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt without subscribers."""
        del self.prompts[prompt.key]
        self._queues[prompt.owner].remove(prompt)
        self._owned[prompt.owner] -= 1
        if prompt.owner in self._gone:
            self.drop(prompt.owner)

    def begin(self, step: StepDraft) -> None:
        """Queue a step draft behind the queued step drafts of its server."""
        self._woken(step.owner).begin(step)

    def withdraw(self, step: StepDraft) -> None:
        """Remove a step draft from its queue."""
        self._queues[step.owner].remove(step)

    def finish(self, completion: Completion) -> None:
        """Mark a completion as finished, and remove its prompt once all are finished."""
        completion.finished = True
        if completion.text.finished:
            self._queues[completion.text.owner].remove(completion.text)

    def drop(self, peer: Peer) -> None:
        """Remove a disconnected server: at once, or with the last of its prompts."""
        if self._owned[peer]:
            self._gone.add(peer)
        else:
            self._gone.discard(peer)
            del self._owned[peer], self.live_steps[peer]
            self._queues.pop(peer, None)

    def urgent(self) -> Iterator[Completion]:
        """Unfinished completions for the next pass, the most urgent first."""
        return _in_turns([queue.urgent() for queue in self._next()])

    def worthiest(self) -> Iterator[Completion]:
        """As `urgent`, with the work that is worth most to each server first."""
        return _in_turns([queue.worthiest() for queue in self._next()])

    def _next(self) -> list[DraftQueue]:
        """The queues for the next pass, the one with the least time first."""
        queues = self._in_turn()
        return queues[:1] if self._apart else queues

    def worth_to(self, peer: Peer) -> DraftWorth:
        """What draft tokens are worth to a server that has prompts."""
        return self._queues[peer].worth

    def urgency(self, completion: Completion) -> Urgency:
        """Sort key of an unfinished completion in the queue of its server."""
        return self._queues[completion.text.owner].urgency(completion)

    @property
    def busy(self) -> list[Peer]:
        """Servers with unfinished completions."""
        return [peer for peer, queue in self._queues.items() if queue]

    def urgent_tokens(self, peer: Peer, typical: float) -> float:
        """Number of tokens that a server's unfinished step drafts and first completions need.

        `typical` is the expected length of a first completion.
        """
        queue = self._queues.get(peer)
        return queue.urgent_tokens(typical) if queue is not None else 0.0

    def is_far_back(self, peer: Peer, place: Place) -> bool:
        """Whether the next prompts of the server, which come first, are before this place."""
        queue = self._queues.get(peer)
        return queue is not None and queue.is_far_back(place)

    def charge(self, tokens: Counter[Peer], seconds: float) -> None:
        """Divide the `seconds` of a pass among the servers by the tokens computed for each."""
        queues = [(queue, tokens[peer]) for peer, queue in self._queues.items() if tokens[peer]]
        if queues:
            self._now = max(self._now, min(queue.seconds for queue, _ in queues))
        for queue, count in queues:
            queue.seconds += seconds * count / tokens.total()
            queue.worth.fade()

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly the unfinished completions are queued, each once."""
        for queue in self._queues.values():
            queue.check_integrity()
        queued = {c for queue in self._queues.values() for c in queue.urgent()}
        steps_seen = 0
        for key, prompt in self.prompts.items():
            assert prompt.key == key, "a prompt has the key of another"
            steps = [s.step_draft for s in prompt.subscriptions.values() if s.step_draft]
            steps_seen += len(steps)
            for completion in itertools.chain(*(t.completions for t in (prompt, *steps))):
                assert completion.finished != (completion in queued), (
                    "an unfinished completion is not queued, or a finished one is"
                )
                queued.discard(completion)
        assert not queued, "a completion without a prompt is queued"
        assert steps_seen == self.live_steps.total(), "the number of step drafts is wrong"

    def _woken(self, peer: Peer) -> DraftQueue:
        """Return the server's queue, to add to. An idle server gains no claim to extra time."""
        queue = self._queues.setdefault(peer, DraftQueue())
        if not queue:
            queue.seconds = max(queue.seconds, self._now)
        return queue

    def _in_turn(self) -> list[DraftQueue]:
        """Queues that are not empty, the one with the least time first."""
        return sorted((q for q in self._queues.values() if q), key=lambda queue: queue.seconds)


def _in_turns(iterators: list[Iterator[Completion]]) -> Iterator[Completion]:
    """Yield one completion of each iterator in turn."""
    while iterators:
        left = []
        for iterator in iterators:
            if (completion := next(iterator, None)) is not None:
                yield completion
                left.append(iterator)
        iterators = left
