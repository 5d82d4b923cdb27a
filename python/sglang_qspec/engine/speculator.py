"""The drafts of all live requests: what was asked of the sidecar, what came back, what it earned.

One `Speculator` lives in a scheduler's process and belongs to its thread. It is told of a request's
events (`enqueue`, `end`), is polled for the sidecar's messages, and is asked for draft trees. It
never waits: a message that cannot be sent now is sent at a later poll, or never.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.engine.drawn import DrawnDrafts
from sglang_qspec.engine.first_drafts import FirstDrafts
from sglang_qspec.engine.followed import Followed
from sglang_qspec.engine.live import Live, Tally, sources_of
from sglang_qspec.engine.totals import Totals
from sglang_qspec.engine.wishes import read_controls, read_guesses
from sglang_qspec.link import Link, LinkState
from sglang_qspec.messages import Admit, Close, Dice, Drafted
from sglang_qspec.sidecar.process import SidecarProcess
from sglang_qspec.trie import DraftTrees, Source, TrieStore

STREAMS_PER_SUBMISSION = 1 << 20
"""Completions and step drafts of one submission are numbered below this."""
MESSAGES_PER_POLL = 64
"""Bounds the time of one poll: about 10 us a message."""
POLL_S = 0.0002
"""Between two polls of a wait."""


class Speculator:
    """See the module. `link` is None when there is neither a draft model nor an endpoint.

    `sidecar` is the one at its other end, where the server has started it and keeps it alive.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        vocab_size: int,
        tries: TrieStore,
        link: Link | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        sidecar: SidecarProcess | None = None,
    ) -> None:
        self.totals = Totals()
        self.first_drafts = FirstDrafts()
        self.drawn = DrawnDrafts()
        self.lead = settings.step_tokens if settings.mode != "queue" else 0
        """How far step drafts are to run ahead of what is committed, in tokens; 0 for none."""
        self._clock = clock
        self._settings = settings
        self._vocab_size = vocab_size
        self._tries = tries
        self._link = link
        self._sidecar = sidecar
        self._live: dict[str, Live] = {}
        self._serials = itertools.count(1)
        self._unsent: dict[str, None] = {}
        self._followed = Followed()
        self._generation = 0
        self._steps_taken = 0

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
        rank: tuple[int, int] = (0, 0),
        dice: Dice | None = None,
    ) -> None:
        """A request joined the queue; `output_ids` is not empty if it was retracted from decoding.

        A retracted request keeps its trie, and drafts are asked for anew from its longer prefix.
        Requests of a smaller `rank` are served sooner, and those of one rank as they come.
        `dice` are those with which the target draws its tokens, if it does.
        """
        wanted = read_controls(custom_params, self._settings)
        if max_new_tokens - len(output_ids) <= 1 or not wanted.enabled:
            return
        live = self._live.get(rid)
        if live is not None and output_ids and live.prompt_ids == prompt_ids:
            self._forget_at_sidecar(rid, live)
            live.renew(next(self._serials))
            live.waits = True
            self._live[rid] = self._live.pop(rid)  # behind those that wait
        else:
            self.end(rid)
            live = Live(
                rid,
                self._tries.open(rid, prompt_ids, sources=sources_of(wanted)),
                wanted,
                rank,
                next(self._serials),
                prompt_ids,
                [],
                max_new_tokens,
                stop_token_ids,
                ignore_eos,
                self._clock(),
                dice=dice,
            )
            self._live[rid] = live
            self._insert_guesses(rid, live, custom_params)
        self._commit(rid, live, output_ids[len(live.output_ids) :])
        if self._asks_sidecar(live):
            self._unsent[rid] = None
            self._submit_unsent()

    def _insert_guesses(
        self, rid: str, live: Live, custom_params: Mapping[str, Any] | None
    ) -> None:
        if "guess" not in live.controls.sources:
            return
        guesses = read_guesses(custom_params, self._settings, self._vocab_size)
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
        elif self._settings.on_admission == "defer" and rid in self._followed:
            self._defer(rid, live)

    def _defer(self, rid: str, live: Live) -> None:
        """Best effort: if it cannot be sent now, the drafts only come in another order."""
        if self._link is not None and self._link.state is LinkState.READY:
            self._link.send(Admit(rid=rid, serial=live.serial))

    def end(self, rid: str, output_len: int | None = None) -> Tally | None:
        """The request is over, however it ended. None if nothing was drafted for it.

        `output_len`, where the last pass may have run over the end, is what counts of the output.
        """
        live = self._live.pop(rid, None)
        if live is None:
            return None
        self._tries.close(rid)
        self.drawn.end(rid)
        self._forget_at_sidecar(rid, live)
        if output_len is not None:
            self.totals.take_back(live.tally.clip(output_len))
        return live.tally

    def _forget_at_sidecar(self, rid: str, live: Live) -> None:
        live.unfinished.clear()
        self._unsent.pop(rid, None)
        if rid in self._followed and self._link is not None:
            self._followed.end(rid)
            self._link.send(Close(rid=rid, serial=live.serial))

    def poll(self) -> None:
        """Take in what the sidecar sent, and send what could not be sent before."""
        if self._sidecar is not None:
            self._sidecar.keep_alive()
        self._exchange()

    def _exchange(self) -> None:
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
                live.renew(next(self._serials))
                self._followed.end(rid)
                stopped = not live.waits and self._settings.on_admission == "stop"
                if self._asks_sidecar(live) and not stopped:
                    self._unsent[rid] = None
        if self._unsent:
            self._submit_unsent()

    def _take(self, drafted: Drafted) -> None:
        live = self._live.get(drafted.rid)
        if live is None or live.serial != drafted.serial:
            return
        is_step = MAX_COMPLETIONS <= drafted.completion < STREAMS_PER_SUBMISSION
        if not is_step and drafted.completion >= live.controls.completions:
            return  # nobody asked for it
        if live.queued_at is not None:
            self.first_drafts.observe(self._clock() - live.queued_at)
            live.queued_at = None
        self._steps_taken += is_step
        if is_step:
            live.steps = True
            live.rests = drafted.finished and self._followed.knows(live.rid, drafted.known_len)
        elif drafted.finished:
            live.unfinished.discard(drafted.completion)
        if not drafted.token_ids:
            return
        insertion = self._tries.insert(
            drafted.rid,
            live.trie.serial,
            Source.STEP if is_step else Source.QUEUE,
            # Another sidecar's completion of the same number is another stream.
            drafted.serial * STREAMS_PER_SUBMISSION + drafted.completion,
            drafted.base_len,
            drafted.start,
            drafted.token_ids,
            greedy=drafted.completion == 0 and live.controls.greedy_first,
        )
        if is_step and live.wants_candidates and not insertion.refused:
            self.drawn.take(drafted)

    def _submit_unsent(self) -> None:
        if self._link is None or self._link.state is not LinkState.READY:
            return
        for rid in list(self._unsent):
            live = self._live[rid]
            message = live.submission
            if not self._link.send(message):
                return
            self._followed.begin(rid, message.base_len)
            live.unfinished = set(range(message.completions))
            del self._unsent[rid]
            if not live.waits and self._settings.on_admission == "defer":
                self._defer(rid, live)

    def propose(
        self,
        rids: Sequence[str],
        outputs: Sequence[Sequence[int]],
        width: int,
        *,
        drafts: bool = True,
    ) -> DraftTrees:
        """For each request a tree of at most `width` tokens, its root included.

        Just the root where there is nothing to propose, and for all without `drafts`. `outputs` are
        the committed tokens of each, at least one; the tries follow them, and they only grow.
        """
        drafting = [
            rid if self._follow(rid, output_ids) and drafts else None
            for rid, output_ids in zip(rids, outputs, strict=True)
        ]
        self._report(rids)
        roots = [output_ids[-1] for output_ids in outputs]
        return self._tries.propose(drafting, roots, width)

    def awaited(self, rids: Sequence[str], trees: DraftTrees) -> NDArray[np.bool_]:
        """For which of these requests more of a step draft is to come: bool [bs].

        Where drafts run further ahead than a pass verifies, only if the tree has room for more.
        """
        awaited = np.zeros(len(rids), dtype=np.bool_)
        if self._link is None or self._link.state is not LinkState.READY or not self.lead:
            return awaited
        for row, (rid, size) in enumerate(zip(rids, trees.sizes.tolist(), strict=True)):
            live = self._live.get(rid)
            if live is not None and (size < trees.width or self.lead < trees.width):
                awaited[row] = self._followed.awaits(live)
        return awaited

    def wait_for_steps(self, seconds: float) -> bool:
        """Wait for more of any step draft, at most so long; whether it came."""
        before, until = self._steps_taken, self._clock() + seconds
        while True:
            self._exchange()
            if self._steps_taken > before:
                return True
            if self._clock() >= until or self._link is None:
                return False
            time.sleep(POLL_S)

    def _follow(self, rid: str, output_ids: Sequence[int]) -> bool:
        """Commit what is new; whether another draft token may be of use."""
        live = self._live.get(rid)
        if live is None:
            return False
        self._commit(rid, live, output_ids[len(live.output_ids) :])
        return live.max_new_tokens - len(output_ids) > 1

    def _commit(self, rid: str, live: Live, fresh: Sequence[int]) -> None:
        if fresh:
            live.rests = False
            live.output_ids += fresh
            self._tries.commit(rid, fresh)

    def settle(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """A pass over `trees` is done: `accepted` are the nodes that the target confirmed.

        `bonus_ids` are the tokens that it chose behind them.
        """
        self.totals.settle(trees, accepted)
        sizes, sources = trees.sizes.tolist(), trees.sources.tolist()
        for row, rid in enumerate(rids):
            live = self._live.get(rid)
            if live is None:
                continue
            tally = live.tally
            tally.passes += 1
            tally.proposed += sizes[row] - 1
            tally.latest = [Source(sources[row][node]) for node in accepted[row]]
            for source in tally.latest:
                tally.accepted[source] += 1
            confirmed = trees.token_ids[row, accepted[row]].tolist()
            self._commit(rid, live, [*confirmed, bonus_ids[row]])
        self._report(rids)

    def _report(self, rids: Sequence[str]) -> None:
        """Let the sidecar follow what these requests have committed."""
        link = self._link
        if link is not None and link.state is LinkState.READY and self.lead:
            self._followed.report(rids, self._live, link, self.lead)

    def _asks_sidecar(self, live: Live) -> bool:
        """Whether anything that the sidecar drafts may be used for the request."""
        return (
            self.lead > 0 and "step" in live.controls.sources
        ) or "queue" in live.controls.sources

    def drop_drafts(self) -> None:
        """Forget all drafts, as when the target's weights change; requests stay live."""
        for rid, live in self._live.items():
            self._forget_at_sidecar(rid, live)
            live.renew(next(self._serials))  # what is under way is of no use either
            live.trie = self._tries.open(rid, live.prompt_ids, sources=sources_of(live.controls))
            self._tries.commit(rid, live.output_ids)

    @property
    def step_times(self) -> list[tuple[float, float]]:
        """(completions, seconds) of the sidecar's passes for steps, from small to large."""
        heartbeat = self._link.heartbeat if self._link is not None else None
        return heartbeat.step_times if heartbeat is not None else []

    def describe(self) -> dict[str, Any]:
        """For /server_info and /metrics: the sidecar's state, what is kept, what it has earned.

        What only a sidecar in reach does, is zero without one. The totals are since the start,
        `drafted_tokens` since the sidecar's.
        """
        link = self._link
        heartbeat = link.heartbeat if link is not None else None
        ready = link is not None and link.state is LinkState.READY
        in_flight = sum(bool(live.unfinished) for live in self._live.values())
        return {
            "sidecar": "none" if link is None else link.state.value,
            "sidecar_restarts": self._sidecar.restarts if self._sidecar is not None else 0,
            "live_requests": len(self._live),
            "requests_in_flight": in_flight if ready else 0,
            "drafting_requests": heartbeat.requests if heartbeat and ready else 0,
            "drafting_rows": heartbeat.rows if heartbeat and ready else 0,
            "queue_to_first_draft_seconds": self.first_drafts.describe(),
            "drafted_tokens": heartbeat.drafted_tokens if heartbeat else 0,
            "step_passes": heartbeat.step_passes if heartbeat else 0,
            "step_tokens": heartbeat.step_tokens if heartbeat else 0,
            "step_seconds": heartbeat.step_seconds if heartbeat else 0.0,
            **self.totals.describe(),
            "trie_tokens": self._tries.size,
            "evictions": self._tries.evictions,
            "refused_chunks": {
                reason.name.lower(): count
                for reason, count in self._tries.refused.items()
                if reason.refused
            },
            "dropped_messages": {
                "to_sidecar": link.dropped if link is not None else 0,
                "from_sidecar": heartbeat.dropped_messages if heartbeat else 0,
                "malformed": link.malformed if link is not None else 0,
            },
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError if requests, tries and pending messages disagree."""
        self._tries.check_integrity()
        if len(self._tries) != len(self._live) or any(r not in self._tries for r in self._live):
            raise RuntimeError("the open tries are not those of the live requests")
        if not self._unsent.keys() <= self._live.keys():
            raise RuntimeError("a request that is over waits to be submitted")


_active: Speculator | None = None


def active() -> Speculator | None:
    """The speculator of this process, once its worker exists."""
    return _active


def activate(speculator: Speculator) -> None:
    """Let SGLang's hooks in this process reach `speculator`."""
    global _active
    _active = speculator
