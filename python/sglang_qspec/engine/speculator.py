"""The drafts of all live requests: what was asked of the sidecar, what came back, what it earned.

One `Speculator` lives in a scheduler's process and belongs to its thread. It is told of a request's
events (`enqueue`, `end`), is polled for the sidecar's messages, and is asked for draft trees. It
never waits: a message that cannot be sent now is sent at a later poll, or never.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.errors import GuessError
from sglang_qspec.guess import GUESS_IDS_KEY, GuessLimits, check_guess_ids
from sglang_qspec.link import Link, LinkState
from sglang_qspec.messages import Admit, Close, Drafted, Submit
from sglang_qspec.trie import DraftTree, RequestTrie, Source, TrieStore

logger = logging.getLogger(__name__)

MESSAGES_PER_POLL = 64
"""Bounds the time of one poll: about 10 us a message."""


@dataclass
class Tally:
    """What speculation did for one request. Counts are tokens, passes are target passes."""

    passes: int = 0
    """Decode and verify passes; the pass of the prompt is not counted."""
    proposed: int = 0
    accepted: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    latest: list[Source] = field(default_factory=list)
    """Sources of the draft tokens that the latest pass accepted, in order."""

    def clip(self, output_len: int) -> None:
        """Take back what the latest pass accepted behind the end of an output of `output_len`.

        A pass may run over a stop token or the length limit. What is left adds up: one token
        from the prompt's pass, one from each other, and the accepted ones.
        """
        excess = 1 + self.passes + sum(self.accepted.values()) - output_len
        for source in self.latest[max(0, len(self.latest) - excess) :] if excess > 0 else ():
            self.accepted[source] -= 1

    def record(self) -> dict[str, Any]:
        """As `meta_info["qspec"]` shows it; `accept_length` counts the target's own token too."""
        accepted = sum(self.accepted.values())
        return {
            "proposed_tokens": self.proposed,
            "accepted_tokens": accepted,
            "accept_length": (self.passes + accepted) / self.passes if self.passes else 0.0,
            "passes": self.passes,
            "accepted_by_source": {
                source.name.lower(): count for source, count in self.accepted.items()
            },
        }


@dataclass
class _Live:
    """A request between its enqueueing and its end."""

    trie: RequestTrie
    serial: int
    """Of the latest submission."""
    prompt_ids: list[int]
    output_ids: list[int]
    """Committed so far."""
    max_new_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    waits: bool = True
    """It is not served yet, or waits again."""
    tally: Tally = field(default_factory=Tally)


class Speculator:
    """See the module. `link` is None when there is neither a draft model nor an endpoint."""

    def __init__(
        self, settings: QSpecConfig, vocab_size: int, tries: TrieStore, link: Link | None
    ) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._tries = tries
        self._link = link
        self._live: dict[str, _Live] = {}
        self._serials = itertools.count(1)
        self._unsent: dict[str, None] = {}
        self._generation = 0

    def enqueue(
        self,
        rid: str,
        *,
        prompt_ids: list[int],
        output_ids: list[int],
        max_new_tokens: int,
        stop_token_ids: list[int],
        ignore_eos: bool = False,
        custom_params: Mapping[str, Any] | None = None,
    ) -> None:
        """A request joined the queue; `output_ids` is not empty if it was retracted from decoding.

        A retracted request keeps its trie, and drafts are asked for anew from its longer prefix.
        """
        remaining = max_new_tokens - len(output_ids)
        if remaining <= 1:
            return
        live = self._live.get(rid)
        if live is not None and output_ids and live.prompt_ids == prompt_ids:
            self._forget_at_sidecar(rid, live)
            live.serial = next(self._serials)
            live.waits = True
        else:
            self.end(rid)
            live = _Live(
                self._tries.open(rid, prompt_ids),
                next(self._serials),
                prompt_ids,
                [],
                max_new_tokens,
                stop_token_ids,
                ignore_eos,
            )
            self._live[rid] = live
            self._insert_guesses(rid, live, custom_params)
        self._commit(rid, live, output_ids)
        self._unsent[rid] = None
        self._submit_unsent()

    def _insert_guesses(
        self, rid: str, live: _Live, custom_params: Mapping[str, Any] | None
    ) -> None:
        """Guesses were checked when the request came in; here they are only read."""
        value = (custom_params or {}).get(GUESS_IDS_KEY)
        if value is None:
            return
        limits = GuessLimits(self._settings.max_guesses, self._settings.max_guess_tokens)
        try:
            guesses = check_guess_ids(value, limits, self._vocab_size)
        except GuessError as error:
            logger.warning("Ignored the guesses of a request: %s", error)
            return
        for number, token_ids in enumerate(guesses):
            self._tries.insert(rid, live.trie.serial, Source.GUESS, number, 0, 0, token_ids)

    def admit(self, rid: str) -> None:
        """The request waits no longer. What the sidecar does about it is a setting."""
        live = self._live.get(rid)
        if live is None or not live.waits:
            return
        live.waits = False
        if self._settings.on_admission == "stop":
            self._forget_at_sidecar(rid, live)
        elif self._settings.on_admission == "defer" and rid not in self._unsent:
            self._defer(rid, live)

    def _defer(self, rid: str, live: _Live) -> None:
        """Best effort: if it cannot be sent now, the drafts only come in another order."""
        if self._link is not None and self._link.state is LinkState.READY:
            self._link.send(Admit(rid=rid, serial=live.serial))

    def end(self, rid: str) -> Tally | None:
        """The request is over, however it ended. None if nothing was drafted for it."""
        live = self._live.pop(rid, None)
        if live is None:
            return None
        self._tries.close(rid)
        self._forget_at_sidecar(rid, live)
        return live.tally

    def _forget_at_sidecar(self, rid: str, live: _Live) -> None:
        if self._unsent.pop(rid, _SENT) is _SENT and self._link is not None:
            self._link.send(Close(rid=rid, serial=live.serial))

    def poll(self) -> None:
        """Take in what the sidecar sent, and send what could not be sent before."""
        if self._link is None:
            return
        for message in self._link.receive(MESSAGES_PER_POLL):
            if isinstance(message, Drafted):
                self._take(message)
        if self._link.state is not LinkState.READY:
            return
        if self._link.generation != self._generation:
            # A new sidecar knows nothing of the requests that the old one was drafting.
            self._generation = self._link.generation
            for rid, live in self._live.items():
                live.serial = next(self._serials)
                if live.waits or self._settings.on_admission != "stop":
                    self._unsent[rid] = None
        if self._unsent:
            self._submit_unsent()

    def _take(self, drafted: Drafted) -> None:
        live = self._live.get(drafted.rid)
        if live is None or live.serial != drafted.serial:
            return
        self._tries.insert(
            drafted.rid,
            live.trie.serial,
            Source.QUEUE,
            # Another sidecar's completion of the same number is another stream.
            drafted.serial * MAX_COMPLETIONS + drafted.completion,
            drafted.base_len,
            drafted.start,
            drafted.token_ids,
            greedy=drafted.completion == 0,
        )

    def _submit_unsent(self) -> None:
        if self._link is None or self._link.state is not LinkState.READY:
            return
        for rid in list(self._unsent):
            live = self._live[rid]
            remaining = live.max_new_tokens - len(live.output_ids)
            message = Submit(
                rid=rid,
                serial=live.serial,
                token_ids=live.prompt_ids + live.output_ids,
                base_len=len(live.output_ids),
                max_new_tokens=min(remaining, self._settings.max_completion_tokens),
                completions=self._settings.completions,
                temperature=self._settings.temperature,
                stop_token_ids=live.stop_token_ids,
                ignore_eos=live.ignore_eos,
            )
            if not self._link.send(message):
                return
            del self._unsent[rid]
            if not live.waits and self._settings.on_admission == "defer":
                self._defer(rid, live)

    def propose(self, rid: str, output_ids: Sequence[int], width: int) -> DraftTree:
        """A tree of at most `width` tokens after the committed `output_ids`, its root included.

        Just the root if there is nothing to propose. The trie follows `output_ids`, which only
        grow.
        """
        live = self._live.get(rid)
        if live is None:
            return root_only(output_ids[-1])
        self._commit(rid, live, output_ids)
        if live.max_new_tokens - len(output_ids) <= 1:
            return root_only(output_ids[-1])
        return live.trie.propose(width)

    def _commit(self, rid: str, live: _Live, output_ids: Sequence[int]) -> None:
        fresh = list(output_ids[len(live.output_ids) :])
        if fresh:
            live.output_ids += fresh
            self._tries.commit(rid, fresh)

    def settle(self, rid: str, tree: DraftTree, accepted: Sequence[int]) -> None:
        """A pass over `tree` is done: `accepted` are the nodes that the target confirmed."""
        live = self._live.get(rid)
        if live is None:
            return
        live.tally.passes += 1
        live.tally.proposed += len(tree) - 1
        live.tally.latest = [tree.sources[node] for node in accepted]
        for source, count in live.trie.settle(tree, accepted).items():
            live.tally.accepted[source] += count

    def drop_drafts(self) -> None:
        """Forget all drafts, as when the target's weights change; requests stay live."""
        for rid, live in self._live.items():
            self._forget_at_sidecar(rid, live)
            live.trie = self._tries.open(rid, live.prompt_ids)
            self._tries.commit(rid, live.output_ids)

    def describe(self) -> dict[str, Any]:
        """For /server_info: the sidecar's state, and what is kept."""
        heartbeat = self._link.heartbeat if self._link is not None else None
        return {
            "sidecar": "none" if self._link is None else self._link.state.value,
            "live_requests": len(self._live),
            "trie_tokens": self._tries.size,
            "drafting_rows": heartbeat.rows if heartbeat else 0,
            "drafted_tokens": heartbeat.drafted_tokens if heartbeat else 0,
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError if requests, tries and pending messages disagree."""
        self._tries.check_integrity()
        if len(self._tries) != len(self._live) or any(r not in self._tries for r in self._live):
            raise RuntimeError("the open tries are not those of the live requests")
        if not self._unsent.keys() <= self._live.keys():
            raise RuntimeError("a request that is over waits to be submitted")


def root_only(token_id: int) -> DraftTree:
    """The tree of a request without drafts: its last committed token."""
    return DraftTree((token_id,), (0,), (Source.OUTPUT,), (1.0,))


_SENT = object()

_active: Speculator | None = None


def active() -> Speculator | None:
    """The speculator of this process, once its worker exists."""
    return _active


def activate(speculator: Speculator) -> None:
    """Let SGLang's hooks in this process reach `speculator`."""
    global _active
    _active = speculator
