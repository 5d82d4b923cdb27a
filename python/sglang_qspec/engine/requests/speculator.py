"""The drafts of all live requests: whose they are, what comes for them, and what they have earned.

One `Speculator` lives in a scheduler's process and belongs to its thread. It is told of a request's
events (`enqueue`, `end`), is polled for the sidecar's messages, and is asked for draft trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig
from sglang_qspec.controls import Controls
from sglang_qspec.engine.requests.live_request import LiveRequest, Tally, sources_of
from sglang_qspec.engine.requests.options import read_controls, read_guesses
from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.engine.requests.step_proposals import StepProposals
from sglang_qspec.engine.sidecar.client import STREAMS_PER_SUBMISSION, SidecarClient, is_step
from sglang_qspec.engine.telemetry.first_drafts import FirstDrafts
from sglang_qspec.engine.telemetry.totals import Totals
from sglang_qspec.link import Link
from sglang_qspec.messages import Drafted, SeededSampling
from sglang_qspec.policy import FirstTokens, Sources
from sglang_qspec.sidecar.process import SidecarProcess
from sglang_qspec.trie import DraftTrees, RequestTrie, Source, TrieStore

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
        runtime_settings: RuntimeSettings | None = None,
    ) -> None:
        self.settings = settings
        self.runtime_settings = runtime_settings or RuntimeSettings.of(
            settings, MAX_DRAFT_TOKENS, graphs=False
        )
        self.totals = Totals()
        self.first_drafts = FirstDrafts()
        self.drawn = StepProposals()
        self.sources = Sources(clock)
        self._link_seconds = 0.0
        self._clock = clock
        self._vocab_size = vocab_size
        self._tries = tries
        self._live: dict[str, LiveRequest] = {}
        self.sidecar = SidecarClient(settings, self._live, link, sidecar, self.sources, clock)
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
        seeded: SeededSampling | None = None,
    ) -> None:
        """A request joined the queue; `output_ids` is not empty if it was retracted from decoding.

        A retracted request keeps its trie, and drafts are asked for anew from its longer prefix.
        Requests of a smaller `rank` are served sooner, and those of one rank as they come.
        `seeded` are those with which the target draws its tokens, if it does.
        """
        wanted = self.runtime_settings.grant(read_controls(custom_params, self.settings))
        if max_new_tokens - len(output_ids) <= 1 or not wanted.enabled:
            return
        live = self._live.get(rid)
        if live is not None and output_ids and live.prompt_ids == prompt_ids:
            self.sidecar.forget(live)
            live.waits = True
            self._live[rid] = self._live.pop(rid)  # behind those that wait
        else:
            self.end(rid)
            live = LiveRequest(
                rid,
                self._open_trie(rid, prompt_ids, wanted),
                wanted,
                rank,
                prompt_ids,
                [],
                max_new_tokens,
                stop_token_ids,
                ignore_eos,
                self._clock(),
                seeded=seeded,
            )
            self._live[rid] = live
            self._insert_guesses(rid, live, custom_params)
        self._commit(rid, live, output_ids[len(live.output_ids) :])
        self.sidecar.submit(live)

    def _open_trie(self, rid: str, prompt_ids: list[int], wanted: Controls) -> RequestTrie:
        return self._tries.open(
            rid, prompt_ids, sources=sources_of(wanted), max_width=wanted.draft_token_num
        )

    def _insert_guesses(
        self, rid: str, live: LiveRequest, custom_params: Mapping[str, Any] | None
    ) -> None:
        if "guess" not in live.controls.sources:
            return
        guesses = read_guesses(custom_params, self._vocab_size)
        for number, token_ids in enumerate(guesses):
            self._tries.insert(rid, live.trie.serial, Source.GUESS, number, 0, 0, token_ids)

    def admit(self, rid: str) -> None:
        """The request waits no longer."""
        live = self._live.get(rid)
        if live is not None and live.waits:
            live.waits = False
            self.sidecar.admit(live)

    def end(self, rid: str, output_len: int | None = None) -> Tally | None:
        """The request is over, however it ended. None if nothing was drafted for it.

        `output_len`, where the last pass may have run over the end, is what counts of the output.
        """
        live = self._live.pop(rid, None)
        if live is None:
            return None
        self._tries.close(rid)
        self.drawn.end(rid)
        self.sidecar.forget(live)
        if output_len is not None:
            self.totals.take_back(live.tally.clip(len(live.output_ids) - output_len))
        return live.tally

    def poll(self) -> None:
        """Take in what the sidecar sent, and send what could not be sent before."""
        began = self._clock()
        self.sidecar.keep_alive()
        self._exchange()
        self._link_seconds += self._clock() - began

    def _exchange(self) -> None:
        for live, drafted in self.sidecar.receive():
            self._take(live, drafted)
        self.sidecar.catch_up()

    def _take(self, live: LiveRequest, drafted: Drafted) -> None:
        step = is_step(drafted)
        if live.queued_at is not None:
            self.first_drafts.observe(self._clock() - live.queued_at)
            live.queued_at = None
        self._steps_taken += step
        if not drafted.token_ids:
            return
        insertion = self._tries.insert(
            live.rid,
            live.trie.serial,
            Source.STEP if step else Source.QUEUE,
            # Another sidecar's completion of the same number is another stream.
            drafted.submission * STREAMS_PER_SUBMISSION + drafted.completion,
            drafted.base_len,
            drafted.start,
            drafted.token_ids,
            greedy=drafted.completion == 0 and live.controls.greedy_first,
        )
        if step and live.wants_candidates and not insertion.refused:
            self.drawn.take(live.rid, drafted)

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
        return self._tries.propose(drafting, roots, width, paused=self.sources.paused)

    def _report(self, rids: Sequence[str]) -> None:
        began = self._clock()
        self.sidecar.report(rids)
        self._link_seconds += self._clock() - began

    def take_link_seconds(self) -> float:
        """Seconds spent on sending and receiving since the last call, without waits."""
        seconds, self._link_seconds = self._link_seconds, 0.0
        return seconds

    def factors(self, rids: Sequence[str]) -> NDArray[np.float64]:
        """How much of each request's scores is to be believed: [bs]."""
        lives = map(self._live.get, rids)
        return np.array([1.0 if live is None else live.credit.factor for live in lives])

    def awaited(self, rids: Sequence[str], trees: DraftTrees) -> NDArray[np.bool_]:
        """For which of these requests more of a step draft is to come: bool [bs].

        Where drafts run further ahead than a pass verifies, only if the tree has room for more.
        """
        awaited = np.zeros(len(rids), dtype=np.bool_)
        if not self.sidecar.ready or not self.sidecar.lookahead:
            return awaited
        for row, (rid, size) in enumerate(zip(rids, trees.sizes.tolist(), strict=True)):
            live = self._live.get(rid)
            if live is None:
                continue
            widest = min(trees.width, live.controls.draft_token_num)
            if size < widest or self.sidecar.lookahead < widest:
                awaited[row] = self.sidecar.awaits(live)
        return awaited

    def wait_for_steps(self, seconds: float) -> bool:
        """Wait for more of any step draft, at most so long; whether it came."""
        before, until = self._steps_taken, self._clock() + seconds
        while True:
            self._exchange()
            if self._steps_taken > before:
                return True
            if self._clock() >= until:
                return False
            time.sleep(POLL_S)

    def _follow(self, rid: str, output_ids: Sequence[int]) -> bool:
        """Commit what is new; whether another draft token may be of use."""
        live = self._live.get(rid)
        if live is None:
            return False
        self._commit(rid, live, output_ids[len(live.output_ids) :])
        return live.max_new_tokens - len(output_ids) > 1

    def _commit(self, rid: str, live: LiveRequest, fresh: Sequence[int]) -> None:
        if fresh:
            live.output_ids += fresh
            self._tries.commit(rid, fresh)

    def record(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """A pass over `trees` is done: `accepted` are the nodes that the target confirmed.

        `bonus_ids` are the tokens that it chose behind them.
        """
        self.totals.record(trees, accepted)
        sizes, sources, tokens = (
            array.tolist() for array in (trees.sizes, trees.sources, trees.token_ids)
        )
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
            confirmed = [tokens[row][node] for node in accepted[row]]
            self._commit(rid, live, [*confirmed, bonus_ids[row]])
        self._report(rids)

    def judge(self, rids: Sequence[str], offered: DraftTrees, first: FirstTokens) -> None:
        """See what the trees that were `offered` to a pass were worth, verified or not."""
        claimed: list[float] = np.where(first.proposed, offered.scores, 0.0).sum(axis=1).tolist()
        right: list[int] = first.right.sum(axis=1).tolist()
        for row, rid in enumerate(rids):
            live = self._live.get(rid)
            if live is not None and claimed[row]:
                live.credit.observe(claimed[row], right[row] > 0)

    def drop_drafts(self) -> None:
        """Forget all drafts, as when the target's weights change; requests stay live.

        For those that wait, drafts are asked for anew.
        """
        for rid, live in self._live.items():
            self.sidecar.forget(live)  # what is under way is of no use either
            live.trie = self._open_trie(rid, live.prompt_ids, live.controls)
            self._tries.commit(rid, live.output_ids)
            if live.waits:
                self.sidecar.submit(live)

    def turn(self, name: str, value: float) -> None:
        """Turn a knob, as `RuntimeSettings.set`. All drafting stops and begins with `enabled`."""
        before = self.runtime_settings.enabled
        self.runtime_settings.set(name, value)
        if before and not self.runtime_settings.enabled:
            self.sidecar.stop()
        elif self.runtime_settings.enabled and not before:
            self.sidecar.resume()

    def describe(self) -> dict[str, Any]:
        """For /server_info and /metrics: the sidecar's state, what is kept, what it has earned.

        The totals are since the start, `drafted_tokens` since the sidecar's.
        """
        return {
            **self.sidecar.describe(),
            "live_requests": len(self._live),
            "queue_to_first_draft_seconds": self.first_drafts.describe(),
            **self.totals.describe(),
            "sources": self.sources.describe(),
            "trie_tokens": self._tries.size,
            "evictions": self._tries.evictions,
            "refused_chunks": {
                reason.name.lower(): count
                for reason, count in self._tries.refused.items()
                if reason.refused
            },
        }

    def close(self) -> None:
        """Close the link and end the server's own sidecar, without waiting for its end."""
        self.sidecar.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if requests, tries and pending messages disagree."""
        self._tries.check_integrity()
        if len(self._tries) != len(self._live) or any(r not in self._tries for r in self._live):
            raise RuntimeError("the open tries are not those of the live requests")
        self.sidecar.check_integrity()


_latest: Speculator | None = None
_failed = False


def active() -> Speculator | None:
    """The speculator of this process; None before its worker exists, and after a failure."""
    return None if _failed else _latest


def latest() -> Speculator | None:
    """The speculator of this process, also after a failure."""
    return _latest


def activate(speculator: Speculator) -> None:
    """Let SGLang's hooks in this process reach `speculator`."""
    global _latest, _failed
    _latest, _failed = speculator, False


def deactivate() -> Speculator | None:
    """End speculation in this process. Returns the speculator that was active."""
    global _failed
    ended, _failed = active(), True
    return ended
