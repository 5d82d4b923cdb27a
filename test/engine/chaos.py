"""Runs random schedules of requests with a sidecar that misbehaves in every way.

A seed determines a schedule. The speculator, the tries, the link's codec and the acceptance walk
are a server's code. The link is the library's fake, and the target is a script. Each request has
its own token ids, so a token in a tree shows for which request it was drafted. `FOREIGN` ids occur
only in messages that must not reach any tree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.link.frame import encode
from sglang_qspec.messages import Declined, Drafted, Gap, Submit
from sglang_qspec.trie import DraftTrees, TrieLimits, TrieStore
from sglang_qspec.verify.accept import accept
from test.engine.speculating import finish_pass

TOKENS_EACH = 16
"""Number of token ids that belong to one request; few, so that its text repeats itself."""
MAX_REQUESTS = 100
FOREIGN = range(TOKENS_EACH)
"""Token ids that belong to no request."""
VOCAB = TOKENS_EACH * (MAX_REQUESTS + 1)
MAX_REQUEST_TOKENS = 192
MAX_TOTAL_TOKENS = 768
SLOTS = 4
WIDTH = 8
HUGE = 1 << 40


@dataclass
class Request:
    """One request and the target's answer to it."""

    rid: str
    own: range
    """Token ids that belong to this request alone."""
    prompt_ids: list[int]
    text: list[int]
    """The target's whole answer."""
    guess_ids: list[int]
    """The client's guess; may be empty."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens committed so far."""

    @property
    def done(self) -> bool:
        return len(self.output_ids) >= len(self.text)


class Chaos:
    """One random schedule. `step` makes one random event happen, then checks the invariants."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        # The answers have their own generator, because they must not depend on the events.
        self._texts = random.Random(f"texts {seed}")
        self.link = FakeSidecarLink(self._completions, vocab_size=VOCAB)
        config = QSpecConfig(
            max_request_tokens=MAX_REQUEST_TOKENS,
            max_total_tokens=MAX_TOTAL_TOKENS,
            mode=self.rng.choice(["ahead", "ahead", "ahead", "queue"]),
            on_admission=self.rng.choice(["defer", "defer", "stop", "continue"]),
        )
        limits = TrieLimits(VOCAB, MAX_REQUEST_TOKENS, 128, MAX_TOTAL_TOKENS)
        self.tries = TrieStore(limits)
        self.active = Speculator(config, VOCAB, self.tries, Opened((self.link,)))
        self.opened = 0
        self.finished: list[Request] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.requests: dict[int, Request] = {}
        """All requests so far, by number."""
        self._request_of: dict[int, Request] = {}
        """Requests by the number of their submission."""
        self.lying = True
        """Whether the sidecar sends wrong drafts; if not, it drafts the target's own answer."""
        self._honesty = self.rng.choice([0.0, 0.02, 0.3])
        """Probability that a lying sidecar drafts the target's answer."""
        self._followed = 0
        """Number of commit messages already answered with step drafts."""
        self._step_drafts = MAX_COMPLETIONS
        self._checked = 0
        """Number of submits already checked."""

    def step(self) -> None:
        """Make one random event happen to the requests or the sidecar."""
        life: list[Callable[[], None]] = [self.enqueue, self.admit, self.retract, self.abort]
        passes: list[Callable[[], None]] = [self.serve_pass, self.active.poll]
        mishaps: list[Callable[[], None]] = [self.lie, self.lie, self.disturb, self.lose]
        kinds, weights = (life, passes, mishaps), (4, 5, 5 if self.lying else 0)
        self.rng.choice(self.rng.choices(kinds, weights)[0])()
        self.check()

    def calm(self) -> None:
        """End the faults: connect a good sidecar and serve all live requests to their end."""
        self.lying = False
        self.link.queue_full = self.link.drop_all = False
        self.link.delay = self.link.interval = 0
        self.link.truncate_to = None
        self.link.revive()
        self.drain()

    def drain(self) -> None:
        """Serve all live requests to their end."""
        while self.waiting or self.running:
            self.active.poll()
            self.admit()
            self.serve_pass()
            self.check()

    # Events of requests.

    def enqueue(self) -> None:
        if self.opened >= MAX_REQUESTS:
            return
        self.opened += 1
        rid = self.rng.choice([f"r{number}" for number in range(12)])
        free = rid not in {request.rid for request in (*self.waiting, *self.running)}
        rid = rid if free else f"only-{self.opened}"
        own = range(self.opened * TOKENS_EACH, (self.opened + 1) * TOKENS_EACH)
        text = self._texts.choices(own, k=self._texts.randint(2, 60))
        prompt_ids = self._texts.choices(own, k=self._texts.randint(1, 30))
        guess_ids = self._texts.choice([[], text[:9], self._texts.choices(own, k=5)])
        request = Request(rid, own, prompt_ids, text, guess_ids)
        self.waiting.append(request)
        self.requests[self.opened] = request
        self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        self.active.enqueue(
            request.rid,
            prompt_ids=list(request.prompt_ids),
            output_ids=list(request.output_ids),
            max_new_tokens=len(request.text),
            stop_token_ids=[],
            custom_params={"qspec_guess_ids": request.guess_ids} if request.guess_ids else None,
        )

    def admit(self) -> None:
        """Prefill the first waiting request, which gives one token."""
        if self.waiting and len(self.running) < SLOTS:
            request = self.waiting.pop(0)
            self.active.admit(request.rid)
            request.output_ids.append(request.text[len(request.output_ids)])
            self.running.append(request)
            self._finish()

    def retract(self) -> None:
        if self.running:
            request = self.running.pop(self.rng.randrange(len(self.running)))
            self.waiting.insert(0, request)
            self._hand_over(request)

    def abort(self) -> None:
        requests = self.rng.choice([self.waiting, self.running])
        if requests and self.rng.random() < 0.4:
            self.active.end(requests.pop(self.rng.randrange(len(requests))).rid)

    def serve_pass(self) -> None:
        """One decode pass over all running requests, as `engine.passes.worker` makes it."""
        if not self.running:
            return
        batch = list(self.running)
        rids, outputs = [r.rid for r in batch], [r.output_ids for r in batch]
        trees = self.active.propose(rids, outputs, WIDTH)
        if self.active.awaited(rids, trees).any() and self.active.wait_for_steps(0.0):
            trees = self.active.propose(rids, outputs, WIDTH)
        for row, request in enumerate(batch):
            self._check_tree(request, trees, row)
        accepted = self._verify(batch, trees)
        bonus_ids = []
        for row, request in enumerate(batch):
            drafts = trees.token_ids[row, accepted[row]].tolist()
            place = len(request.output_ids) + len(drafts)
            bonus_ids.append(_answer(request, place))
            request.output_ids += [*drafts, bonus_ids[-1]]
        finish_pass(self.active, rids, trees, accepted, bonus_ids)
        self._finish()
        if self.rng.random() < 0.7:
            self.follow()

    def _verify(self, batch: Sequence[Request], trees: DraftTrees) -> list[list[int]]:
        """The accepted nodes of each tree, by the walk that a CPU server uses."""
        layout = trees.lay_out()
        targets = [[0] * trees.width for _ in batch]
        for row, request in enumerate(batch):
            depths = layout.depths[row].tolist()
            for node in range(int(trees.sizes[row])):
                targets[row][node] = _answer(request, len(request.output_ids) + depths[node])
        links = layout.next_token.tolist(), layout.next_sibling.tolist()
        paths = accept(trees.token_ids.tolist(), *links, targets, trees.width)
        return [path[1:] for path in paths]

    def _finish(self) -> None:
        for request in [request for request in self.running if request.done]:
            self.running.remove(request)
            self.finished.append(request)
            del request.output_ids[len(request.text) :]  # a pass may accept tokens past the end
            self.active.end(request.rid, len(request.text))

    # Events of the sidecar.

    def _completions(self, submit: Submit) -> list[list[int]]:
        """The fake's completions: the target's own answer, or random tokens of the request."""
        # Token ids belong to one request each, so the first one identifies the request.
        request = self.requests[submit.token_ids[0] // TOKENS_EACH]
        self._request_of[submit.submission] = request
        rest = request.text[submit.base_len :]
        if not self.lying:
            return [rest]
        return [
            rest
            if self.rng.random() < self._honesty
            else self.rng.choices(request.own, k=len(rest) + 4)
            for _ in range(self.rng.randint(0, 8))
        ]

    def follow(self) -> None:
        """Answer new commits with step drafts, as an honest sidecar does."""
        for commits in self.link.commits[self._followed :]:
            for commit in commits.requests:
                request = self._request_of[commit.submission]
                base_len = commit.base_len + len(commit.token_ids)
                draft = request.text[base_len : base_len + commit.max_new_tokens]
                if draft:
                    self._step_drafts += 1
                    self.link.inject(
                        Drafted(commit.submission, self._step_drafts, base_len, 0, draft)
                    )
        self._followed = len(self.link.commits)

    def lie(self) -> None:
        """Send messages of random wrong kinds, about a live or an ended request."""
        if not self.link.submits:
            return
        submit = self.rng.choice(self.link.submits[-20:])
        request = self._request_of[submit.submission]
        live = any(request is other for other in (*self.waiting, *self.running))
        newest = next(
            s for s in reversed(self.link.submits) if self._request_of[s.submission] is request
        )
        # Drafts under a live submission may reach its tree, so they use the request's own ids.
        ids = request.own if live and submit is newest else FOREIGN
        wrong = [submit.submission + HUGE, -submit.submission]
        if ids is FOREIGN:
            wrong.append(submit.submission)
        foreign = [self._foreign(number, request) for number in wrong]
        for frame in (*self._frames(submit, ids), *foreign):
            if self.rng.random() < 0.3:
                self.link.inject_frame(frame)

    def _foreign(self, submission: int, victim: Request) -> bytes:
        """A draft under a number of no open submission; the target accepts its first tokens."""
        base_len = len(victim.output_ids)
        lookahead = victim.text[base_len : base_len + self.rng.randint(0, 4)]
        return encode(
            Drafted(
                submission,
                MAX_COMPLETIONS,
                base_len,
                0,
                [*lookahead, *self.rng.choices(FOREIGN, k=4)],
            )
        )

    def _frames(self, submit: Submit, ids: range) -> list[bytes]:
        rng, submission = self.rng, submit.submission

        def draft(**changes: object) -> bytes:
            fields: dict[str, object] = {
                "submission": submission,
                "completion": rng.choice([0, 1, 7, 8, MAX_COMPLETIONS - 1, MAX_COMPLETIONS + 5]),
                "base_len": submit.base_len,
                "start": 0,
                "token_ids": rng.choices(ids, k=rng.randint(1, 12)),
                "finished": rng.random() < 0.3,
            }
            return encode(Drafted(**{**fields, **changes}))  # type: ignore[arg-type]

        outside = [ids[0], rng.choice([VOCAB, VOCAB + 1, -1, -HUGE, HUGE, (1 << 63) - 1])]
        return [
            draft(base_len=rng.randint(0, 80)),
            draft(start=rng.randint(1, 40)),
            draft(base_len=-1),
            draft(start=-HUGE),
            draft(start=(1 << 31) - 1),
            draft(token_ids=[]),
            draft(token_ids=rng.choices(ids, k=2 * MAX_REQUEST_TOKENS)),
            draft(token_ids=outside),
            draft(completion=-1),
            draft(completion=rng.choice([1 << 20, (1 << 20) + 3, (1 << 31) - 1, HUGE])),
            draft(submission=0),
            encode(Gap(submission, rng.choice([None, 0, submit.base_len, 70]))),
            *([encode(Declined(submission, "by chance"))] if rng.random() < 0.05 else []),
            rng.randbytes(rng.randint(0, 40)),
            draft()[:-3],
        ]

    def disturb(self) -> None:
        """Make the link slow, full, lossy, duplicating or reordering, or restore it."""
        link, rng = self.link, self.rng
        kind = rng.randrange(8)
        if kind == 0:
            link.queue_full = not link.queue_full
        elif kind == 1:
            link.drop_all = not link.drop_all
        elif kind == 2:
            link.delay, link.interval = rng.randrange(6), rng.randrange(4)
        elif kind == 3:
            link.chunk = rng.randint(1, 20)
        elif kind == 4:
            link.truncate_to = rng.choice([None, 0, 3])
        elif kind == 5:
            link.reorder(rng.randrange(1000))
        elif kind == 6:
            link.duplicate()
        else:
            self.follow()

    def lose(self) -> None:
        """Lose the sidecar or connect another; sometimes drop all drafts, as new weights do."""
        kind = self.rng.randrange(8)
        if kind < 2:
            self.link.die()
        elif kind < 6:
            self.link.revive()
        elif kind == 6:
            self.link.refuse("it does not fit any more")
        else:
            self.active.drop_drafts()

    # Invariants.

    def check(self) -> None:
        self.active.check_integrity()
        described = self.active.describe()
        live = len(self.waiting) + len(self.running)
        assert described["live_requests"] <= live
        assert 0 <= described["requests_in_flight"] <= live
        assert described["trie_tokens"] <= MAX_TOTAL_TOKENS + 32 * live
        for submit in self.link.submits[self._checked :]:
            request = self._request_of[submit.submission]
            output_ids = submit.token_ids[len(request.prompt_ids) :]
            assert submit.token_ids[: len(request.prompt_ids)] == request.prompt_ids
            assert output_ids == request.text[: submit.base_len]
        self._checked = len(self.link.submits)

    def _check_tree(self, request: Request, trees: DraftTrees, row: int) -> None:
        tree = trees[row]
        tree.check_integrity()
        assert tree.token_ids[0] == request.output_ids[-1]
        assert set(tree.token_ids) <= set(request.own), "a foreign draft"


def _answer(request: Request, place: int) -> int:
    """The target's token at position `place` of the output; past its end, one fixed token."""
    return request.text[place] if place < len(request.text) else request.own[0]
