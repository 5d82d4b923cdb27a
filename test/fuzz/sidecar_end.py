"""Runs the sidecar's end of the link under any frames: codec, loop, drafter, scripted model.

The operation of a record, modulo 16, selects the event. 13 ends a round of the loop and adds up to
three rounds without messages. 14 can make a server depart or passes fail. At any other value a
server sends the frame. The upper bits choose the server and the variants of 13 and 14.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from sglang_qspec.errors import DraftModelError, LinkError
from sglang_qspec.link import Peer
from sglang_qspec.link.frame import decode_from_sidecar, decode_to_sidecar, encode
from sglang_qspec.messages import (
    Commits,
    Drafted,
    FromSidecar,
    Hello,
    Ping,
    Submit,
    ToSidecar,
    max_to_sidecar_bytes,
)
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.loop import MAX_FAILURES, serve
from test.fuzz.allowed import check_from_sidecar, check_to_sidecar
from test.fuzz.frames import Record
from test.sidecar.scripted import ScriptedModel
from test.sidecar.scripted_head import ScriptedHead, eager

VOCAB = 100
"""Not a multiple of the block size in which logits are read."""
CONTEXT = 64
MOST_TOKENS = 500
"""Maximum text tokens, and maximum draft tokens, kept for one server."""
PEERS = 3
QUIET: Record = (13, b"")
"""Ends a round and adds no empty round."""


class FailedPassError(RuntimeError):
    """The failure of a pass that a record requested."""


def script(sequence: tuple[int, ...]) -> int:
    """A token that depends on the whole sequence, so that different texts get different drafts."""
    return (31 * sum(sequence) + 7 * len(sequence) + sequence[-1]) % VOCAB


class Model(ScriptedModel):
    """A scripted model that refuses token ids outside its embedding."""

    def _say(self, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        told = itertools.chain.from_iterable(sequences)
        assert all(0 <= token < VOCAB for token in told), "a token id that does not exist"
        return super()._say(sequences)


class WatchedDrafter(Drafter):
    """Keeps the first exception that no record requested, because the loop only logs it."""

    unexpected: Exception | None = None

    def step(self, ends: Callable[[], bool] = lambda: False) -> None:
        try:
            super().step(ends)
        except Exception as error:
            self._watch(error)
            raise

    def handle(self, peer: Peer, message: ToSidecar) -> None:
        try:
            super().handle(peer, message)
        except Exception as error:
            self._watch(error)
            raise

    def _watch(self, error: Exception) -> None:
        # If a prompt fails when tried alone, its failure is the cause of a PromptError.
        if not isinstance(error.__cause__ or error, FailedPassError):
            self.unexpected = self.unexpected or error


def _guess(sequence: tuple[int, ...]) -> int:
    """What the head of the draft model guesses."""
    return script(sequence) if sum(sequence) % 3 else 0


class SidecarEnd:
    """One sidecar over any number of runs; after each run it must keep nothing of its servers."""

    def __init__(
        self,
        *,
        share: bool = False,
        apart: bool = False,
        tokens: int = 160,
        rows: int = 10,
        slots: int = 6,
        prefill_tokens: int = 24,
        guesses: bool = False,
        check_every: int = 1,
    ) -> None:
        """Create a model with `tokens` KV slots in `rows` rows.

        With `guesses` it has a head of its own, which is right for two of three tokens.

        Check all invariants after every `check_every` rounds, and at the end of each run.
        """
        self.frames = 0
        """Number of frames read so far."""
        self.malformed = 0
        """Number of refused frames and of Commits entries that were left out."""
        self.answers = 0
        self.processes_ended = 0
        """Number of times that the loop ended after failures in a row."""
        self._check_every = check_every
        self._rounds = 0
        self._share = share
        self._model = Model(
            script,
            vocab_size=VOCAB,
            context_len=CONTEXT,
            tokens=tokens,
            rows=rows,
            eos_token_ids=[VOCAB - 1],
        )
        self.drafter = WatchedDrafter(
            self._model,
            slots=slots,
            max_completion_tokens=12,
            prefill_tokens=prefill_tokens,
            apart=apart,
            share=share,
            max_server_tokens=MOST_TOKENS,
            most_passes=1 if apart else 4,  # as on a CPU and on a GPU
            guesser=eager(ScriptedHead(self._model, _guess)) if guesses else None,
        )
        self._sessions = itertools.count()
        self._peers: list[Peer] = [self._newcomer() for _ in range(PEERS)]
        self._coming: deque[Record] = deque()
        self._gone: list[Peer] = []
        self._texts: dict[tuple[Peer, int], list[Submit]] = {}
        """Submissions by number; several where a server used a number twice."""
        self._outputs: dict[tuple[Peer, int], list[list[int]]] = {}
        """The committed output of each submission."""
        self._uncertain: set[tuple[int, ...]] = set()
        """Texts submitted with a temperature above 1, at which the model can draw any token. Up to
        1 it draws the script's token. Equal texts share completions at any temperature."""

    def run(self, run: Iterable[Record]) -> None:
        """Serve all records, then make all servers depart; raises the first failure."""
        self._coming = deque(run)
        while self._coming:
            try:
                serve(self.drafter, self, lambda: not self._coming)
            except DraftModelError as error:
                if not isinstance(error.__cause__, FailedPassError):
                    raise
                self._depart_all()  # because the process would end
                self.processes_ended += 1
        self._check()
        self._depart_all()
        self.drafter.step()
        self.check_empty()

    def _depart_all(self) -> None:
        """Make all servers depart and new ones connect."""
        self._model.failures.clear()
        self._model.passes.clear()
        for peer in (*self._gone, *self._peers):
            self.drafter.drop(peer)
        self._gone.clear()
        self._peers = [self._newcomer() for _ in range(PEERS)]
        self.drafter._outbox._retry_at = 0.0
        self.drafter.take()
        self._texts.clear()
        self._outputs.clear()
        self._uncertain.clear()

    def check_empty(self) -> None:
        """Raise AssertionError if anything is kept without any server."""
        drafter, model = self.drafter, self._model
        self._check()
        assert drafter.idle
        assert drafter.requests == len(drafter.queue.prompts) == model.rows.open_rows == 0
        assert model.rows.free_slots == model.rows.total_slots
        quota, queue = drafter._quota, drafter.queue
        assert not quota._submissions
        assert not quota._text_tokens
        assert not quota._draft_tokens
        assert not queue._queues
        assert not queue._gone
        assert not queue._owned
        assert not queue.live_steps
        assert not drafter.retries
        assert not drafter._outbox._undelivered

    # The interface that the loop uses.

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]:
        """The messages of one round."""
        self._rounds += 1
        if self._rounds % self._check_every == 0:
            self._check()
        received = []
        while self._coming:
            operation, frame = self._coming.popleft()
            action, choice = operation % 16, operation // 16
            place = choice % PEERS
            if action == 13:
                self._coming.extendleft([QUIET] * (choice // 4) if frame else ())
                break
            if action == 14 and choice < 8:
                self._disturb(choice)
            else:
                message = self._read(frame)
                if message is not None:
                    self._note(self._peers[place], message)
                    received.append((self._peers[place], message))
        return received

    def _disturb(self, choice: int) -> None:
        if choice < PEERS:
            self._gone.append(self._peers[choice])
            self._peers[choice] = self._newcomer()
        else:
            failures = MAX_FAILURES if choice == 7 else 1
            self._model.failures += [FailedPassError("injected failure")] * failures

    def departed(self) -> list[Peer]:
        gone, self._gone = self._gone, []
        return gone

    def send(self, peer: Peer, message: FromSidecar) -> bool:
        """Check that the sidecar may send this message to the server."""
        self.answers += 1
        assert decode_from_sidecar(encode(message), VOCAB) == message
        check_from_sidecar(message, VOCAB)
        if peer in self._peers and isinstance(message, Drafted):
            self._check_text(peer, message)
        # Every 16th message is not delivered, as to a server that reads too slowly.
        return self.answers % 16 > 0

    def _newcomer(self) -> Peer:
        number = next(self._sessions)
        return Peer(str(number), number.to_bytes(4, "little"))

    def _read(self, frame: bytes) -> ToSidecar | None:
        self.frames += 1
        try:
            message = decode_to_sidecar(frame, VOCAB, self._report, max_to_sidecar_bytes(CONTEXT))
        except LinkError:
            self.malformed += 1
            return None
        check_to_sidecar(message, VOCAB)
        # The link itself answers these messages.
        return None if isinstance(message, Hello | Ping) else message

    def _report(self, error: LinkError) -> None:
        self.malformed += 1

    # The checks.

    def _note(self, peer: Peer, message: ToSidecar) -> None:
        """Record the texts for which the server may get drafts."""
        if isinstance(message, Submit):
            name = (peer, message.submission)
            self._texts.setdefault(name, []).append(message)
            self._outputs.setdefault(name, []).append([])
            if message.temperature > 1 or (message.seeded and message.seeded.temperature > 1):
                self._uncertain.add(tuple(message.token_ids))
        elif isinstance(message, Commits):
            for commit in message.requests:
                name = (peer, commit.submission)
                for submit, output in zip(
                    self._texts.get(name, ()), self._outputs.get(name, ()), strict=True
                ):
                    known = submit.base_len + len(output)
                    if commit.base_len <= known:
                        output += commit.token_ids[known - commit.base_len :]

    def _check_text(self, peer: Peer, drafted: Drafted) -> None:
        """Check that the draft is the model's continuation of a text that this server submitted."""
        name = (peer, drafted.submission)
        assert name in self._texts, "a draft for a submission that there never was"
        if not drafted.token_ids:
            return
        submits = self._texts[name]
        if any(tuple(submit.token_ids) in self._uncertain for submit in submits):
            return
        assert any(
            _continues(submit, output, drafted)
            for submit, output in zip(submits, self._outputs[name], strict=True)
        ), f"a draft for another text: {drafted} for {submits}"

    def _check(self) -> None:
        if self.drafter.unexpected is not None:
            raise self.drafter.unexpected
        self.drafter.check_integrity()
        self._check_kv_apart()

    def _check_kv_apart(self) -> None:
        """Check that no KV slot is held for two servers or two scopes."""
        owners: dict[int, tuple[Peer | None, int]] = {}
        for prompt in self.drafter.queue.prompts.values():
            steps = [s.step_draft for s in prompt.subscriptions.values() if s.step_draft]
            for each in (prompt, *steps):
                shared = self._share and not each.scope
                owner = (None if shared else each.owner, each.scope)
                rows = [each.row, *(completion.row for completion in each.completions)]
                for row in rows:
                    if row is None:
                        continue
                    for slot in self._model.rows.slots(row).tolist():
                        assert owners.setdefault(slot, owner) == owner, "KV is shared"


def _continues(submit: Submit, output: list[int], drafted: Drafted) -> bool:
    """Whether the draft equals the script's continuation of the text at its `base_len`."""
    committed = drafted.base_len - submit.base_len
    if not 0 <= committed <= len(output):
        return False
    text = [*submit.token_ids, *output[:committed]]
    for _ in range(drafted.start):
        text.append(script(tuple(text)))
    for token in drafted.token_ids:
        if token != script(tuple(text)):
            return False
        text.append(token)
    return True
