"""Owns the live requests and their drafts.

A scheduler's process has one `Speculator`, which only the scheduler's thread uses. The scheduler
reports the events of a request (`enqueue`, `admit`, `end`), polls for messages of the sidecars
(`poll`), and asks for draft trees (`propose`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig
from sglang_qspec.controls import Controls
from sglang_qspec.engine.requests.jacobi import Jacobi
from sglang_qspec.engine.requests.live_request import LiveRequest, Tally, sources_of
from sglang_qspec.engine.requests.options import read_controls, read_guesses
from sglang_qspec.engine.requests.step_proposals import StepProposals
from sglang_qspec.engine.sidecar.client import STREAMS_PER_SUBMISSION, is_step
from sglang_qspec.engine.sidecar.pool import Opened, SidecarPool
from sglang_qspec.engine.telemetry.first_drafts import FirstDrafts
from sglang_qspec.messages import Drafted, SeededSampling
from sglang_qspec.policy import FirstTokens, LastRequests, Precedence, Sources
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.policy.totals import Totals
from sglang_qspec.trie import DraftTrees, RequestTrie, Source, TrieStore

if TYPE_CHECKING:
    from sglang_qspec.engine.telemetry.metrics import DraftMetrics

POLL_S = 0.0002
"""Seconds between two polls in `wait_for_steps`."""


class Speculator:
    """Owns the live requests and their drafts; `opened` are the sidecars at the start."""

    def __init__(
        self,
        settings: QSpecConfig,
        vocab_size: int,
        tries: TrieStore,
        opened: Opened = Opened(),  # noqa: B008 - it is immutable
        clock: Callable[[], float] = time.monotonic,
        *,
        runtime_settings: RuntimeSettings | None = None,
    ) -> None:
        self.settings = settings
        self.runtime_settings = runtime_settings or RuntimeSettings.of(settings, MAX_DRAFT_TOKENS)
        self.totals = Totals()
        self.series: DraftMetrics | None = None
        """What /metrics has of this; None without `--enable-metrics`."""
        self.first_drafts = FirstDrafts()
        self.step_proposals = StepProposals()
        count = settings.jacobi_tokens
        self.jacobi = Jacobi(count, tries) if count else None
        """Guesses that the target's passes improve; None without the setting."""
        self.sources = Sources(clock)
        self.last_requests = LastRequests()
        self.precedence = Precedence(clock)
        self.link_seconds = 0.0
        """Seconds spent on sending and receiving since the start, without waits."""
        self._link_taken = 0.0
        """The part of `link_seconds` that `take_link_seconds` has returned."""
        self._clock = clock
        self._vocab_size = vocab_size
        self._tries = tries
        self._live: dict[str, LiveRequest] = {}
        self.sidecar = SidecarPool(settings, self._live, opened, self.sources, vocab_size, clock)
        self._steps_taken = 0
        self._run: Sequence[str] = ()
        """The ids of the requests of the latest pass without drafts."""
        self._uncounted = 0
        """Number of further passes of `_run` that its requests have not counted."""
        self.arrivals = 0
        """Number of requests that began to wait so far."""
        self.complete: Callable[[], None] = lambda: None
        """Counts all passes that are over; called before totals and tallies are read."""

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
        scope: Hashable = None,
    ) -> None:
        """Start a request that joined the waiting queue.

        A retracted request comes again with its `output_ids`. It keeps its trie, and its longer
        text is submitted again. SGLang serves requests by ascending `rank`, then by arrival.
        `seeded` is None for a greedy request, and `scope` as `scope_of` describes.
        """
        wanted = self.runtime_settings.grant(read_controls(custom_params, self.settings))
        if max_new_tokens - len(output_ids) <= 1 or not wanted.enabled:
            return
        self.arrivals += 1
        live = self._live.get(rid)
        if live is not None and output_ids and live.prompt_ids == prompt_ids:
            self.sidecar.forget(live)
            live.waits = True
            self._live[rid] = self._live.pop(rid)  # to the end of the order
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
                scope=scope,
            )
            self._live[rid] = live
            self.last_requests.arrive()
            self.totals.lengths.arrive(len(prompt_ids), max_new_tokens)
            self._insert_guesses(rid, live, custom_params)
            if self.jacobi is not None and "jacobi" in wanted.sources:
                self.jacobi.begin(rid, live.trie.serial, prompt_ids)
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
        """Note that a request has left the waiting queue, because SGLang serves it now."""
        live = self._live.get(rid)
        if live is not None and live.waits:
            live.waits = False
            self.sidecar.admit(live)

    def live(self, rid: str) -> LiveRequest | None:
        """The state of a request that may get drafts; None for other requests."""
        return self._live.get(rid)

    def end(self, rid: str, output_len: int | None = None) -> Tally | None:
        """Forget a request that has ended. Returns its tally; None for an unknown request.

        `output_len` is the number of output tokens that the client gets; the last pass may have
        committed more.
        """
        self.complete()
        self._count_run()
        live = self._live.pop(rid, None)
        if live is None:
            return None
        self._tries.close(rid)
        self.step_proposals.end(rid)
        if self.jacobi is not None:
            self.jacobi.end(rid)
        self.sidecar.end(live)
        if output_len is not None:
            self.totals.take_back(live.tally.clip(len(live.output_ids) - output_len))
            self.last_requests.end(at_limit=output_len >= live.max_new_tokens)
            self.totals.lengths.end(output_len)
        if not self._live:
            self.last_requests.end_batch()
        return live.tally

    def poll(self) -> None:
        """Receive the sidecar's messages, and send messages that the link did not take before."""
        began = self._clock()
        self.sidecar.keep_alive()
        self._exchange()
        self.link_seconds += self._clock() - began

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
            self.sidecar.source if step else Source.QUEUE,
            # Another submission may use the same completion number for another stream.
            drafted.submission * STREAMS_PER_SUBMISSION + drafted.completion,
            drafted.base_len,
            drafted.start,
            drafted.token_ids,
            second_ids=drafted.second_ids if step else (),
            greedy=drafted.completion == 0 and live.controls.greedy_first,
        )
        if step and live.wants_candidates and not insertion.refused:
            self.step_proposals.take(live.rid, drafted)

    def propose(
        self,
        rids: Sequence[str],
        outputs: Sequence[Sequence[int]],
        width: int,
        *,
        drafts: bool = True,
        roots: Sequence[int] | None = None,
    ) -> DraftTrees:
        """A tree for each request, of at most `width` tokens including the root.

        A request without drafts gets only the root. If `drafts` is False, every request gets only
        the root. `outputs` has the committed output tokens of each request. New output tokens are
        added to the request's trie and reported to the sidecar. `roots` are the last tokens of the
        texts. If `roots` is None, each output must have a token, and its last token is the root.
        """
        drafting = [
            rid if self._follow(rid, output_ids) and drafts else None
            for rid, output_ids in zip(rids, outputs, strict=True)
        ]
        self._report(rids)
        if self.jacobi is not None:
            for rid in filter(None, drafting):
                self.jacobi.draft(rid, len(self._live[rid].output_ids))
        if roots is None:
            roots = [output_ids[-1] for output_ids in outputs]
        return self._tries.propose(drafting, roots, width, paused=self.sources.paused)

    def follow(self, rids: Sequence[str], outputs: Sequence[Sequence[int]]) -> None:
        """Commit the new tokens of `outputs`, the committed output tokens of each request."""
        for rid, output_ids in zip(rids, outputs, strict=True):
            self._follow(rid, output_ids)

    def show_states(self, rid: str, start: int, states: NDArray[np.int16]) -> None:
        """Send a head the target's states from position `start` of a request's text on.

        They are bfloat16 as int16 [tokens, width].
        """
        live = self._live.get(rid)
        if live is not None:
            began = self._clock()
            self.sidecar.show_states(live, start, states)
            self.link_seconds += self._clock() - began

    def _report(self, rids: Sequence[str]) -> None:
        began = self._clock()
        self.sidecar.report(rids)
        self.link_seconds += self._clock() - began

    def take_link_seconds(self) -> float:
        """The increase of `link_seconds` since the last call."""
        seconds = self.link_seconds - self._link_taken
        self._link_taken = self.link_seconds
        return seconds

    @property
    def running(self) -> int:
        """Number of live requests that SGLang serves now."""
        return sum(not live.waits for live in self._live.values())

    def factors(self, rids: Sequence[str]) -> NDArray[np.float64]:
        """Factor by which each request's scores are multiplied: float64 [bs]."""
        lives = map(self._live.get, rids)
        return np.array([1.0 if live is None else live.credit.factor for live in lives])

    def longest_pass(self, rids: Sequence[str]) -> float:
        """How many times as long a pass with drafts may take as one without.

        `math.inf` if there is no limit.
        """
        lives = filter(None, map(self._live.get, rids))
        return self.precedence.longest_pass(live.rank[0] for live in lives)

    @property
    def others_wait(self) -> bool:
        """Whether requests wait to be served."""
        return any(live.waits for live in self._live.values())

    def passes_left(self) -> dict[str, float]:
        """Expected number of passes to come (`policy.passes_left`), by running request."""
        return {rid: live.passes_left for rid, live in self._live.items() if not live.waits}

    def tokens_left(self, rids: Sequence[str]) -> list[int | None]:
        """Largest number of output tokens to come of each request; None if it is not known."""
        lives = map(self._live.get, rids)
        return [None if live is None else live.tokens_left for live in lives]

    def awaited(self, rids: Sequence[str], trees: DraftTrees) -> NDArray[np.bool_]:
        """Whether the sidecar is about to send step-draft tokens for each request: bool [bs].

        If the lookahead is at least the width of the pass, only trees with free nodes count.
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
        """Wait at most `seconds` for tokens of any step draft. Returns whether some came."""
        before, until = self._steps_taken, self._clock() + seconds
        while True:
            self._exchange()
            if self._steps_taken > before:
                return True
            if self._clock() >= until:
                return False
            time.sleep(POLL_S)

    def _follow(self, rid: str, output_ids: Sequence[int]) -> bool:
        """Commit the new tokens. Returns whether the request can use another draft token."""
        live = self._live.get(rid)
        if live is None:
            return False
        self._commit(rid, live, output_ids[len(live.output_ids) :])
        return live.max_new_tokens - len(output_ids) > 1

    def _commit(self, rid: str, live: LiveRequest, fresh: Sequence[int]) -> None:
        if fresh:
            live.output_ids += fresh
            self._tries.commit(rid, fresh)
            self.sidecar.follow(live, fresh)

    def commit(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Commit the tokens of a pass, and report them to the sidecar, as `Drafts.commit`."""
        tokens = trees.token_ids.tolist()
        for row, rid in enumerate(rids):
            live = self._live.get(rid)
            if live is not None:
                confirmed = [tokens[row][node] for node in accepted[row]]
                self._commit(rid, live, [*confirmed, bonus_ids[row]])
        self._report(rids)

    def count(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        *,
        prefill: bool = False,
    ) -> None:
        """Count a pass over `trees` with the `accepted` nodes of each tree, in order.

        A `prefill` does not count as a pass of a request. Passes without drafts that have the same
        list `rids` one after the other are counted together, later.
        """
        plain = trees.width == 1 and not prefill
        if plain and rids is self._run:
            self._uncounted += 1
            return
        self._count_run()
        self._run = rids if plain else ()
        if plain:
            self._count_plain(rids, 1)
            return
        lives = [self._live.get(rid) for rid in rids]
        self.totals.record(trees, accepted)
        sizes, sources = trees.sizes.tolist(), trees.sources.tolist()
        for row, live in enumerate(lives):
            if live is not None:
                drafted_by = [Source(sources[row][node]) for node in accepted[row]]
                live.tally.add(sizes[row] - 1, drafted_by, prefill=prefill)
                self.sidecar.count(live, drafted_by)

    def _count_run(self) -> None:
        passes, self._uncounted = self._uncounted, 0
        if passes:
            self._count_plain(self._run, passes)

    def _count_plain(self, rids: Sequence[str], passes: int) -> None:
        for rid in rids:
            live = self._live.get(rid)
            if live is not None:
                live.tally.add_plain(passes)
                self.sidecar.count(live, (), passes)

    def update_credit(self, rids: Sequence[str], offered: DraftTrees, first: FirstTokens) -> None:
        """Update the credit of each request by the first tokens of its `offered` tree."""
        claimed: list[float] = np.where(first.proposed, offered.scores, 0.0).sum(axis=1).tolist()
        right: list[int] = first.right.sum(axis=1).tolist()
        for row, rid in enumerate(rids):
            live = self._live.get(rid)
            if live is not None and claimed[row]:
                live.credit.observe(claimed[row], right[row] > 0)

    def drop_drafts(self) -> None:
        """Forget all drafts, for example when the target's weights change; requests stay live.

        Waiting requests are submitted again.
        """
        for rid, live in self._live.items():
            self.sidecar.forget(live)  # ends the submission, so that late drafts are dropped
            live.trie = self._open_trie(rid, live.prompt_ids, live.controls)
            self._tries.commit(rid, live.output_ids)
            if live.waits:
                self.sidecar.submit(live)

    def change_setting(self, name: str, value: float) -> None:
        """Change a runtime setting. `enabled` also stops or resumes the sidecar's drafting."""
        before = self.runtime_settings.enabled
        self.runtime_settings.set(name, value)
        self.sidecar.allow_steps(self.runtime_settings.mode != "queue")
        if before and not self.runtime_settings.enabled:
            self.sidecar.stop()
        elif self.runtime_settings.enabled and not before:
            self.sidecar.resume()

    def describe(self) -> dict[str, Any]:
        """State and totals for /server_info and /metrics.

        Totals count from the start of the server, `drafted_tokens` from the start of the sidecar.
        """
        self.complete()
        return {
            **self.sidecar.describe(),
            "link_seconds": self.link_seconds,
            "live_requests": len(self._live),
            "waiting_requests": len(self._live) - self.running,
            "queue_to_first_draft_seconds": self.first_drafts.describe(),
            **self.totals.describe(),
            "sources": self.sources.describe(),
            **self._tries.describe(),
        }

    def close(self) -> None:
        """Close the links and stop the server's own sidecar, without waiting for its exit."""
        self.sidecar.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if requests, tries and pending messages disagree."""
        self._tries.check_integrity()
        if len(self._tries) != len(self._live) or any(r not in self._tries for r in self._live):
            raise RuntimeError("the open tries are not those of the live requests")
        if self.jacobi is not None and not self.jacobi.requests <= self._live.keys():
            raise RuntimeError("a request that has ended has guesses")
        self.sidecar.check_integrity()
