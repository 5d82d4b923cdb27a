"""Runs the server's end of the link under any frames: codec, sidecar client, speculator, tries.

A `Chaos` creates and serves the requests; the frames of a run are the sidecar's messages. The
operation of a record, modulo 16, selects the event: up to 9 the sidecar sends the frame, at 10 the
server polls, and at 11 to 15 a request or the link changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_qspec.engine.sidecar.client import MAX_REPAIRS
from sglang_qspec.errors import LinkError
from sglang_qspec.link.frame import decode_from_sidecar
from sglang_qspec.messages import SeededSampling
from sglang_qspec.trie import DraftTrees
from test.engine.chaos import TOKENS_EACH, VOCAB, Chaos, Request
from test.fuzz.allowed import check_from_sidecar
from test.fuzz.frames import Record

TEXT_LEN = 40
MOST_UNDER_WAY = 200
"""With this number of frames in flight, or more, the fuzzer does not disturb the link."""


class FrameChaos(Chaos):
    """A `Chaos` that only checks that tokens exist; a frame may name any request's tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.handed_over = 0
        """Number of times that a request was submitted: new, retracted, or with dropped drafts."""

    def _hand_over(self, request: Request) -> None:
        self.handed_over += 1
        # Every other request asks for the candidates of its step drafts.
        drawn = request.own.start // TOKENS_EACH % 2 == 0
        self.active.enqueue(
            request.rid,
            prompt_ids=list(request.prompt_ids),
            output_ids=list(request.output_ids),
            max_new_tokens=len(request.text),
            stop_token_ids=[],
            custom_params={"qspec_guess_ids": request.guess_ids} if request.guess_ids else None,
            seeded=SeededSampling(1, 0.6, probabilities=True) if drawn else None,
        )

    def _check_tree(self, request: Request, trees: DraftTrees, row: int) -> None:
        tree = trees[row]
        tree.check_integrity()
        assert tree.token_ids[0] == request.output_ids[-1]
        assert all(0 <= token < VOCAB for token in tree.token_ids), "a token that does not exist"

    def disturb(self) -> None:
        # Shuffling and duplicating takes longer, the more frames are in flight.
        if len(self.link._pending) < MOST_UNDER_WAY:
            super().disturb()

    def drop_drafts(self) -> None:
        self.handed_over += len(self.waiting)
        self.active.drop_drafts()

    def end_all(self) -> None:
        """Abort all requests."""
        for request in (*self.waiting, *self.running):
            self.active.end(request.rid)
        self.waiting.clear()
        self.running.clear()


class ServerEnd:
    """Runs each list of records on a new server."""

    def __init__(self, *, check_every: int = 1, serve_out: bool = True) -> None:
        """Check all invariants after every `check_every` operations. At the end of a run, serve
        its requests to their end with `serve_out`, otherwise abort them."""
        self.frames = 0
        self.malformed = 0
        self.finished = 0
        """Number of requests that were served to their end."""
        self.accepted = 0
        """Number of accepted draft tokens, from the frames and from the chaos's own drafts."""
        self._check_every = check_every
        self._serve_out = serve_out

    def run(self, run: Iterable[Record], seed: int = 0) -> None:
        """Serve requests under all records; raises the first failure."""
        chaos = FrameChaos(seed)
        chaos.active.poll()
        for _ in range(3):
            chaos.enqueue()
        for place, (operation, frame) in enumerate(run):
            self._act(chaos, operation, frame)
            if place % self._check_every == 0:
                self._check(chaos)
        if self._serve_out:
            chaos.calm()
        else:
            chaos.end_all()
            chaos.link.queue_full = False
            chaos.link.revive()
        chaos.active.poll()  # closes the submissions that the link did not take before
        self._check(chaos)
        self._check_empty(chaos)
        self.finished += len(chaos.finished)
        self.accepted += sum(chaos.active.describe()["accepted_tokens"].values())

    def _act(self, chaos: FrameChaos, operation: int, frame: bytes) -> None:
        action, choice = operation % 16, operation // 16
        if action <= 9:
            self._read(frame)
            chaos.link.inject_frame(frame)
        elif action == 10:
            self._poll(chaos)
        elif action == 11:
            chaos.enqueue()
        elif action == 12:
            chaos.admit()
        elif action == 13:
            self._serve(chaos)
        elif action == 14:
            (chaos.retract, chaos.abort, chaos.follow, chaos.follow)[choice % 4]()
        else:
            mishaps = (chaos.disturb, chaos.disturb, chaos.lose, chaos.drop_drafts)
            mishaps[choice % 4]()

    def _read(self, frame: bytes) -> None:
        """Check that the codec passes only allowed messages; the link decodes the frame again."""
        self.frames += 1
        try:
            message = decode_from_sidecar(frame, VOCAB)
        except LinkError:
            self.malformed += 1
            return
        check_from_sidecar(message, VOCAB)

    def _poll(self, chaos: FrameChaos) -> None:
        """Poll, and check that a poll reports no commits."""
        commits = len(chaos.link.commits)
        chaos.active.poll()
        assert len(chaos.link.commits) == commits, "a poll reported commits"

    def _serve(self, chaos: FrameChaos) -> None:
        """Serve a pass, and check that the number of commit reports is bounded."""
        commits = len(chaos.link.commits)
        running = chaos.running
        proposals = chaos.active.step_proposals.proposals(
            [request.rid for request in running], [request.output_ids for request in running]
        )
        if proposals is not None:
            assert 0 <= int(proposals.candidate_ids.min()) <= int(proposals.candidate_ids.max())
            assert int(proposals.candidate_ids.max()) < VOCAB
        chaos.serve_pass()
        assert len(chaos.link.commits) <= commits + 3, "more reports than a pass makes"

    def _check(self, chaos: FrameChaos) -> None:
        chaos.check()
        trees = len(chaos.requests)
        # The server submits each request once per session, and again for each allowed repair.
        repairs = chaos.link.session_count * trees * (MAX_REPAIRS + 1)
        assert len(chaos.link.submits) <= chaos.handed_over + repairs, "too many submissions"
        assert all(request.output_ids == request.text for request in chaos.finished), "other text"

    def _check_empty(self, chaos: FrameChaos) -> None:
        """Check that nothing is kept of ended requests."""
        described = chaos.active.describe()
        assert described["live_requests"] == described["trie_tokens"] == 0
        assert described["requests_in_flight"] == 0
        (sidecar_client,) = chaos.active.sidecar._clients
        assert not sidecar_client.requests
        assert not sidecar_client.wanted
        assert not sidecar_client.submissions.kept
        assert sidecar_client.submissions.tokens == sidecar_client.submissions.unfinished == 0
        assert not len(chaos.active.step_proposals)
