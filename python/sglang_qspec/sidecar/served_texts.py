"""Owns the texts of all requests that a head drafts for, and the messages about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Candidates,
    Commit,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    States,
    Submit,
)
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.served_text import ServedText
from sglang_qspec.sidecar.text import Subscriber, tokens_of


class ServedTexts:
    """What the servers have sent of their requests, and what the head has read of it.

    Nothing runs the head here. A text that cannot be kept is declined, and gone then.
    """

    def __init__(
        self, rows: KVRows, width: int, longest_draft: int, max_server_tokens: int
    ) -> None:
        """`rows` are the head's KV, and its states have `width` features.

        It drafts at most `longest_draft` tokens, and keeps at most `max_server_tokens` text tokens
        for one server.
        """
        self._rows = rows
        self._width = width
        self._longest_draft = longest_draft
        self._max_tokens = max_server_tokens
        self._texts: dict[Subscriber, ServedText] = {}
        self._busy: dict[Subscriber, ServedText] = {}
        self._kept: Counter[Peer] = Counter()
        """Number of text tokens of each server."""
        self._messages: list[tuple[Peer, FromSidecar]] = []
        self.declined = 0
        """Number of submissions declined since the start."""

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    @property
    def busy(self) -> Mapping[Subscriber, ServedText]:
        """The texts with something to read or to draft."""
        return self._busy

    def messages(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        messages, self._messages = self._messages, []
        return messages

    def submit(self, peer: Peer, message: Submit) -> None:
        """Begin the text of a request."""
        subscriber = (peer, message.submission)
        self.leave(subscriber)
        if len(message.token_ids) >= self._rows.context_len:
            self.decline(subscriber, "the text does not fit the head's context")
        elif self._kept[peer] + len(message.token_ids) > self._max_tokens:
            self.decline(subscriber, "the texts of this server exceed its limit", retry=True)
        else:
            self._kept[peer] += len(message.token_ids)
            self._texts[subscriber] = ServedText(
                tokens_of(message.token_ids),
                len(message.token_ids) - message.base_len,
                message.seeded or GREEDY,
                frozenset(message.stop_token_ids),
            )

    def take_states(self, peer: Peer, message: States) -> None:
        """Keep states; those that are known are skipped, and a gap begins anew behind it."""
        subscriber = (peer, message.submission)
        text = self._texts.get(subscriber)
        if text is None:
            return
        if not message.data or len(message.data) % (2 * self._width):
            self.decline(subscriber, f"states have another width than {self._width}")
            return
        states = np.frombuffer(message.data, np.int16).reshape(-1, self._width)
        end = message.start + len(states)
        if end > self._rows.context_len:
            self.decline(subscriber, "the text does not fit the head's context")
        elif message.start > text.known or text.known == text.begin:
            self._close_row(text)
            text.begin = text.read = message.start
            text.states = [states]
            self.note_work(subscriber)
        elif end > text.known:
            text.states.append(states[text.known - message.start :])
            self.note_work(subscriber)

    def follow(self, peer: Peer, commit: Commit) -> None:
        """Append committed tokens; if the states are complete, a draft behind them is due."""
        subscriber = (peer, commit.submission)
        text = self._texts.get(subscriber)
        if text is None:
            self._messages.append((peer, Gap(commit.submission, None)))
            return
        known = text.output_len
        if commit.base_len > known:
            self._messages.append((peer, Gap(commit.submission, known)))
            return
        fresh = commit.token_ids[known - commit.base_len :]
        if not fresh:
            return
        text.token_ids += tokens_of(fresh)
        self._kept[peer] += len(fresh)
        if len(text.token_ids) >= self._rows.context_len:
            self.decline(subscriber, "the text no longer fits the head's context")
            return
        text.lookahead = min(
            commit.max_new_tokens,
            self._rows.context_len - len(text.token_ids),
            self._longest_draft,
        )
        if not text.lookahead or not text.is_complete or text.token_ids[-1] in text.stops:
            text.lookahead = 0
            self.send(subscriber, text, 0, [], done=True)
        self.note_work(subscriber)

    def send(
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

    def note_work(self, subscriber: Subscriber) -> None:
        """Note whether a text has something to read or to draft."""
        text = self._texts[subscriber]
        if text.readable or text.lookahead:
            self._busy[subscriber] = text
        else:
            self._busy.pop(subscriber, None)

    def decline(self, subscriber: Subscriber, reason: str, *, retry: bool = False) -> None:
        """Drop a text, and tell its server."""
        self.leave(subscriber)
        self.declined += 1
        peer, submission = subscriber
        self._messages.append((peer, Declined(submission, reason, retry)))

    def leave(self, subscriber: Subscriber) -> None:
        """Forget a text, if it is known."""
        text = self._texts.pop(subscriber, None)
        if text is not None:
            self._busy.pop(subscriber, None)
            self._kept[subscriber[0]] -= len(text.token_ids)
            self._close_row(text)

    def drop(self, peer: Peer) -> None:
        """Forget all texts of a server that has gone."""
        for subscriber in [each for each in self._texts if each[0] == peer]:
            self.leave(subscriber)
        del self._kept[peer]

    def _close_row(self, text: ServedText) -> None:
        if text.row is not None:
            self._rows.close(text.row)
            text.row = None

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
