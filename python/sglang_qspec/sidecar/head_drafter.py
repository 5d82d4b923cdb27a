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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from sglang_qspec.config import MAX_COMPLETIONS, MAX_SERVER_TOKENS
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Candidates,
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    OverloadLevel,
    States,
    Submit,
    ToSidecar,
    submissions_of,
)
from sglang_qspec.sidecar.head_runner import HeadOutput, HeadRunner
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.sampler import Choices, choose
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.served_text import ServedText
from sglang_qspec.sidecar.text import Subscriber, tokens_of

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
    """Owns the open submissions of all servers, and drafts for them. One thread calls it."""

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
        self._max_tokens = max_server_tokens
        self._texts: dict[Subscriber, ServedText] = {}
        self._busy: dict[Subscriber, ServedText] = {}
        """The texts with something to read or to draft."""
        self._kept: Counter[Peer] = Counter()
        """Number of text tokens of each server."""
        self._messages: list[tuple[Peer, FromSidecar]] = []
        self.statistics = statistics or PassStatistics()
        self.declined = 0
        """Number of submissions declined since the start."""
        self._advanced = 0
        """Number of texts in the last pass."""

    # What the loop calls.

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not self._busy

    @property
    def requests(self) -> int:
        """Number of requests that wait for more of a draft."""
        return sum(text.lookahead > 0 for text in self._busy.values())

    @property
    def advanced(self) -> int:
        """Number of texts in the last pass; 0 when idle."""
        return 0 if self.idle else self._advanced

    @property
    def texts(self) -> int:
        """Number of texts that are kept."""
        return len(self._texts)

    def handle(self, peer: Peer, message: ToSidecar) -> None:
        """Handle a message of a server."""
        match message:
            case Submit():
                self._submit(peer, message)
            case States():
                self._take_states(peer, message)
            case Commits():
                for commit in message.requests:
                    self._follow(peer, commit)
            case Close():
                self._leave((peer, message.submission))
            case Admit():
                pass

    def expel(self, peer: Peer, message: ToSidecar) -> None:
        """Decline the requests of a message that could not be handled."""
        for submission in submissions_of(message):
            self._decline((peer, submission), "the sidecar failed to handle a message")

    def drop(self, peer: Peer) -> None:
        """Forget all requests of a server that has gone."""
        for subscriber in [each for each in self._texts if each[0] == peer]:
            self._leave(subscriber)
        del self._kept[peer]

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        messages, self._messages = self._messages, []
        return messages

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
                self._decline(subscriber, "a pass of the head failed")
            raise
        for subscriber, _ in chosen:
            self._note_work(subscriber)

    def _note_work(self, subscriber: Subscriber) -> None:
        """Note whether a text has something to read or to draft."""
        text = self._texts[subscriber]
        if text.readable or text.lookahead:
            self._busy[subscriber] = text
        else:
            self._busy.pop(subscriber, None)

    # Messages

    def _submit(self, peer: Peer, message: Submit) -> None:
        subscriber = (peer, message.submission)
        self._leave(subscriber)
        if len(message.token_ids) >= self._rows.context_len:
            self._decline(subscriber, "the text does not fit the head's context")
        elif self._kept[peer] + len(message.token_ids) > self._max_tokens:
            self._decline(subscriber, "the texts of this server exceed its limit", retry=True)
        else:
            self._kept[peer] += len(message.token_ids)
            self._texts[subscriber] = ServedText(
                tokens_of(message.token_ids),
                len(message.token_ids) - message.base_len,
                message.seeded or GREEDY,
                frozenset(message.stop_token_ids),
            )

    def _take_states(self, peer: Peer, message: States) -> None:
        """Keep states; those that are known are skipped, and a gap begins anew behind it."""
        text = self._texts.get((peer, message.submission))
        if text is None:
            return
        width = self._model.width
        if not message.data or len(message.data) % (2 * width):
            self._decline((peer, message.submission), f"states have another width than {width}")
            return
        states = np.frombuffer(message.data, np.int16).reshape(-1, width)
        end = message.start + len(states)
        if end > self._rows.context_len:
            self._decline((peer, message.submission), "the text does not fit the head's context")
        elif message.start > text.known or text.known == text.begin:
            self._close_row(text)
            text.begin = text.read = message.start
            text.states = [states]
            self._note_work((peer, message.submission))
        elif end > text.known:
            text.states.append(states[text.known - message.start :])
            self._note_work((peer, message.submission))

    def _follow(self, peer: Peer, commit: Commit) -> None:
        """Append committed tokens, and draft behind them if the states are complete."""
        submission = commit.submission
        text = self._texts.get((peer, submission))
        if text is None:
            self._messages.append((peer, Gap(submission, None)))
            return
        known = text.output_len
        if commit.base_len > known:
            self._messages.append((peer, Gap(submission, known)))
            return
        fresh = commit.token_ids[known - commit.base_len :]
        if not fresh:
            return
        text.token_ids += tokens_of(fresh)
        self._kept[peer] += len(fresh)
        if len(text.token_ids) >= self._rows.context_len:
            self._decline((peer, submission), "the text no longer fits the head's context")
            return
        text.lookahead = min(
            commit.max_new_tokens,
            self._rows.context_len - len(text.token_ids),
            self._model.longest_draft,
        )
        if not text.lookahead or not text.is_complete or text.token_ids[-1] in text.stops:
            text.lookahead = 0
            self._send((peer, submission), text, 0, [], done=True)
        self._note_work((peer, submission))

    def _send(
        self,
        subscriber: Subscriber,
        text: ServedText,
        start: int,
        token_ids: list[int],
        *,
        candidates: Sequence[Candidates] = (),
        second_ids: Sequence[int] = (),
        done: bool,
    ) -> None:
        """Send tokens of the text's present draft, from position `start` of it on."""
        peer, submission = subscriber
        drafted = Drafted(
            submission,
            MAX_COMPLETIONS + text.drafts,
            text.output_len,
            start,
            token_ids,
            finished=done,
            known_len=text.output_len,
            candidates=list(candidates),
            second_ids=list(second_ids),
        )
        self._messages.append((peer, drafted))

    # Passes

    def _chosen(self) -> list[tuple[Subscriber, ServedText]]:
        """The texts of the next pass: those to draft for, then those to read.

        A text without room in the KV is declined.
        """
        waiting = sorted(self._busy.items(), key=lambda item: not item[1].lookahead)
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
                self._decline(subscriber, "the head's KV is full", retry=True)
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
                self._send(
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

    # Texts

    def _leave(self, subscriber: Subscriber) -> None:
        text = self._texts.pop(subscriber, None)
        if text is not None:
            self._busy.pop(subscriber, None)
            self._kept[subscriber[0]] -= len(text.token_ids)
            self._close_row(text)

    def _close_row(self, text: ServedText) -> None:
        if text.row is not None:
            self._rows.close(text.row)
            text.row = None

    def _decline(self, subscriber: Subscriber, reason: str, *, retry: bool = False) -> None:
        self._leave(subscriber)
        self.declined += 1
        peer, submission = subscriber
        self._messages.append((peer, Declined(submission, reason, retry)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the rows are those of the texts."""
        self._rows.check_integrity()
        rows = [text.row for text in self._texts.values() if text.row is not None]
        assert len(rows) == len(set(rows)) == self._rows.open_rows
        kept: Counter[Peer] = Counter()
        for subscriber, text in self._texts.items():
            kept[subscriber[0]] += len(text.token_ids)
            assert (subscriber in self._busy) == bool(text.readable or text.lookahead)
            assert text.begin <= text.read <= text.known
            if text.row is not None:
                assert self._rows.length(text.row) >= text.read - text.begin
        assert self._busy.keys() <= self._texts.keys()
        assert kept == +self._kept


def _known(values: Mapping[int, Value], place: int) -> list[Value]:
    """The value at this place; empty without one."""
    return [values[place]] if place in values else []
