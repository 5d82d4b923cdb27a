"""Drafts from a target's hidden states with a head, for the requests that the target serves.

A server sends the states of a text as its target computes them, then the tokens. The head reads
them into its KV, and drafts a chain behind the newest token: behind the last state it reads its own
output. With the next commit the rows of the chain are dropped, and the committed tokens are read
again behind the target's own states.

The states of a text may begin later than the text: SGLang does not compute the states of a prefix
that it has cached, and a sidecar that starts later gets none of the earlier ones. The head then
reads the text from there on. After a gap it begins anew behind the gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from sglang_qspec.config import MAX_SERVER_TOKENS
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Close,
    Commits,
    FromSidecar,
    OverloadLevel,
    States,
    Submit,
    ToSidecar,
    submissions_of,
)
from sglang_qspec.sidecar.head_runner import HeadOutput, HeadRunner
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.sampler import Choices, choose
from sglang_qspec.sidecar.served_text import ServedText
from sglang_qspec.sidecar.served_texts import ServedTexts
from sglang_qspec.sidecar.text import Subscriber

Value = TypeVar("Value")

READ_AT_ONCE = 2048
"""Maximum number of tokens that a pass reads, unless one text has more."""
READ = 64
"""Number of tokens of the pass that tells how long reading takes."""


class NoOverload:
    """The overload of a drafter that is never late: it drafts for served requests alone."""

    backlog_s = 0.0
    level = OverloadLevel.NONE
    left_out = 0

    def look(self) -> None:
        """Does nothing."""


class HeadDrafter:
    """Reads the states of all servers' texts, and drafts behind them. One thread calls it."""

    overload = NoOverload()
    retries = ()
    """Prompts of failed passes that are tried again: none, since they are declined."""

    def __init__(
        self,
        model: HeadRunner,
        *,
        statistics: PassStatistics | None = None,
        max_server_tokens: int = MAX_SERVER_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_server_tokens` limits the text tokens kept for one server.

        `statistics` are those of another drafter in this process, to which it adds its own.
        """
        self._model, self._rows = model, model.rows
        self._clock = clock
        self._texts = ServedTexts(model.rows, model.width, model.longest_draft, max_server_tokens)
        self.statistics = statistics or PassStatistics()
        self._advanced = 0
        """Number of texts in the last pass."""

    # What the loop calls.

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not self._texts.busy

    @property
    def requests(self) -> int:
        """Number of requests that wait for more of a draft."""
        return sum(text.lookahead > 0 for text in self._texts.busy.values())

    @property
    def advanced(self) -> int:
        """Number of texts in the last pass; 0 when idle."""
        return 0 if self.idle else self._advanced

    @property
    def texts(self) -> int:
        """Number of texts that are kept."""
        return len(self._texts)

    @property
    def declined(self) -> int:
        """Number of submissions declined since the start."""
        return self._texts.declined

    def handle(self, peer: Peer, message: ToSidecar) -> None:
        """Handle a message of a server."""
        match message:
            case Submit():
                self._texts.submit(peer, message)
            case States():
                self._texts.take_states(peer, message)
            case Commits():
                for commit in message.requests:
                    self._texts.follow(peer, commit)
            case Close():
                self._texts.leave((peer, message.submission))
            case Admit():
                pass

    def expel(self, peer: Peer, message: ToSidecar) -> None:
        """Decline the requests of a message that could not be handled."""
        for submission in submissions_of(message):
            self._texts.decline((peer, submission), "the sidecar failed to handle a message")

    def drop(self, peer: Peer) -> None:
        """Forget all requests of a server that has gone."""
        self._texts.drop(peer)

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        return self._texts.messages()

    def undelivered(self, peer: Peer, message: FromSidecar) -> None:
        """Tokens of a draft are not sent again, because the next commit makes them obsolete."""

    def step(self, ends: Callable[[], bool] = lambda: False) -> None:
        """Read the states that have come, and draft for the texts that are complete.

        Messages are sent whenever it asks whether it `ends`. If a pass raises, the requests in it
        are declined.
        """
        chosen = self._chosen()
        self._advanced = len(chosen)
        try:
            self._draft(*self._read(chosen), ends)
        except Exception:
            for subscriber, _ in chosen:
                self._texts.decline(subscriber, "a pass of the head failed")
            raise
        for subscriber, _ in chosen:
            self._texts.note_work(subscriber)

    # Passes

    def _chosen(self) -> list[tuple[Subscriber, ServedText]]:
        """The texts of the next pass: those to draft for, then those to read.

        A text without room in the KV is declined.
        """
        waiting = sorted(self._texts.busy.items(), key=lambda item: not item[1].lookahead)
        chosen: list[tuple[Subscriber, ServedText]] = []
        tokens, rows, slots = 0, self._rows.free_rows, self._rows.free_slots
        for subscriber, text in waiting[: self._model.slots]:
            tokens += text.readable
            if chosen and tokens > READ_AT_ONCE:
                break
            rows -= text.row is None
            slots -= text.readable + text.lookahead - self._drafted(text)
            if rows >= 0 and slots >= 0:
                chosen.append((subscriber, text))
            else:
                self._texts.decline(subscriber, "the head's KV is full", retry=True)
                rows, slots = max(0, rows), max(0, slots)
        return chosen

    def _drafted(self, text: ServedText) -> int:
        """Number of KV slots of the text's last draft, which the next pass drops."""
        if text.row is None:
            return 0
        return self._rows.length(text.row) - (text.read - text.begin)

    def _read(
        self, chosen: Sequence[tuple[Subscriber, ServedText]]
    ) -> tuple[list[tuple[Subscriber, ServedText]], HeadOutput | None]:
        """Read the states of the chosen texts, and return those to draft for, with their output."""
        reading = [item for item in chosen if item[1].readable]
        if not reading:
            return [], None
        began = self._clock()
        rows, tokens, states = [], [], []
        for _, text in reading:
            if text.row is None:
                text.row = self._rows.open()
            self._rows.truncate(text.row, text.read - text.begin)
            count = text.readable
            rows.append(text.row)
            tokens.append(text.token_ids[text.read + 1 : text.read + 1 + count])
            states.append(text.take(count))
            text.read += count
        output = self._model.extend(rows, tokens, np.concatenate(states))
        read, seconds = sum(map(len, tokens)), self._clock() - began
        drafting = [place for place, (_, text) in enumerate(reading) if text.lookahead]
        self.statistics.observe_pass(len(drafting), seconds)
        self.statistics.observe_reading(len(rows), read, seconds)
        if drafting:
            self.statistics.observe_step(len(rows), len(drafting), read, seconds)
        return [reading[place] for place in drafting], output.of(drafting)

    def _draft(
        self,
        drafting: list[tuple[Subscriber, ServedText]],
        output: HeadOutput | None,
        ends: Callable[[], bool],
    ) -> None:
        """Draft behind the newest tokens of texts, until each draft is complete.

        Each token is sent at once, by the call of `ends`. What it returns is ignored: a chain is
        short, and the head's passes take a small part of a target's.
        """
        length = 0
        while drafting:
            assert output is not None
            began = self._clock()
            chosen = self._sample(drafting, output, length)
            kept = []
            for place, ((peer, submission), text) in enumerate(drafting):
                token = chosen.token_ids[place]
                done = length + 1 >= text.lookahead or token in text.stops
                self._texts.send(
                    (peer, submission),
                    text,
                    length,
                    [token],
                    candidates=_known(chosen.candidates, place),
                    second_ids=_known(chosen.second_ids, place),
                    done=done,
                )
                if done:
                    text.lookahead, text.drafts = 0, text.drafts + 1
                else:
                    kept.append(place)
            self.statistics.drafted_tokens += len(drafting)
            ends()
            drafting = [drafting[place] for place in kept]
            length += 1
            if drafting:
                rows = [text.row for _, text in drafting if text.row is not None]
                tokens = [chosen.token_ids[place] for place in kept]
                output = self._model.step(rows, tokens, output.of(kept).hidden)
                seconds, count = self._clock() - began, len(drafting)
                self.statistics.observe_pass(count, seconds)
                self.statistics.observe_step(count, count, count, seconds)

    def _sample(
        self,
        drafting: Sequence[tuple[Subscriber, ServedText]],
        output: HeadOutput,
        length: int,
    ) -> Choices:
        """The next token of each draft, of which each has `length` tokens."""
        texts = [text for _, text in drafting]
        none = [0] * len(texts)
        positions = [len(text.token_ids) + length - 1 for text in texts]
        sizes = [min(peer.vocab_size, self._model.vocab_size) for (peer, _), _ in drafting]
        samplings = [text.sampling for text in texts]
        return choose(output.logits, samplings, none, positions, sizes, seconds=True)

    def warm_up(self) -> None:
        """Run first passes, and take their times as those of draft steps and of reading."""
        state = np.zeros((1, self._model.width), np.int16)
        rows, size = [self._rows.open()], 1
        count = min(READ, self._rows.context_len, self._rows.free_slots // 2)
        times = []
        try:
            began = self._clock()
            self._model.extend(rows, [[0] * count], state.repeat(count, 0))
            self.statistics.expect_reading((self._clock() - began) / count)
            self._rows.truncate(rows[0], 0)
            while size <= min(self._model.slots, self._rows.free_rows):
                rows += [self._rows.open() for _ in range(size - len(rows))]
                began = self._clock()
                output = self._model.extend(rows, [[0]] * size, state.repeat(size, 0))
                if self._model.longest_draft > 1:
                    began = self._clock()
                    self._model.step(rows, [0] * size, output.hidden)
                times.append((size, self._clock() - began))
                size *= 2
            self.statistics.expect_steps(times)
        finally:
            for row in rows:
                self._rows.close(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the rows are those of the texts."""
        self._texts.check_integrity()


def _known(values: Mapping[int, Value], place: int) -> list[Value]:
    """The value at this place; empty without one."""
    return [values[place]] if place in values else []
