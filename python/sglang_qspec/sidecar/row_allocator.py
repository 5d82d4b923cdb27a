"""Assigns the draft model's KV rows to completions, and evicts rows when rows or KV run short."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sglang_qspec.link import Peer
from sglang_qspec.sidecar.completion import Completion
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.prompt import Prompt
from sglang_qspec.sidecar.turns import Turns

SHARED_PREFIX = 16
"""Minimum length, in tokens, of a common prefix for prompts to share its KV."""
SHARED_AMONG = 32
"""Number of latest prompts that are searched for a common prefix."""
HEADROOM = 16
"""Number of free KV slots per running completion that is required before another gets a row."""


class RowAllocator:
    """Owns the model's rows: each belongs to a completion, or keeps a prompt for its completions.

    The row of a prompt's first completion is kept for the prompt when the completion is finished: a
    step draft goes on from it. When rows or KV run short, such spare rows go first, those of the
    prompts that are served last before others, and then the least urgent completions lose theirs;
    what they have drafted stays, and its KV is computed again when their turn comes. All rows that
    a server needs come from its own, except while another server holds more KV.

    KV is shared among prompts of one server, and with `share` among those of all.
    """

    def __init__(self, model: DraftKV, turns: Turns, *, share: bool = False) -> None:
        self._model = model
        self._turns = turns
        self._share = share
        self._holders: dict[Completion, None] = {}
        """Completions that hold a row, in the order in which they got it."""
        self._kept: dict[Prompt, None] = {}
        """Prompts with a row of their own, in the order in which they got it."""
        self._spare: dict[Prompt, None] = {}
        """Those of them that none of the prompt's completions waits for."""

    def missing(self, completion: Completion) -> int:
        """Number of tokens of prompt and completion without KV in its row; at least 1."""
        covered = 0 if completion.row is None else self._model.length(completion.row)
        return len(completion) - covered

    def allocate(
        self, completion: Completion, running: Collection[Completion], reserved: int
    ) -> bool:
        """Give the completion a row; False if it has to wait for KV.

        Nothing less urgent than it keeps a row that it needs, except the `running` completions,
        which grow beside it and take `reserved` tokens at once. Without any, it gets a row
        however little KV there is.
        """
        while True:
            source, shared = self._source(completion)
            wanted = len(completion) - shared + HEADROOM * len(running) + reserved
            enough = not running or wanted <= self._model.free_tokens
            if self._model.free_rows and enough:
                break
            if not self.make_room(completion, running):
                return False
        row = self._model.open() if source is None else self._model.fork(source, shared)
        self._give(completion, row)
        self._close_or_spare(completion.prompt)
        return True

    def make_room(self, first: Completion, running: Collection[Completion] = ()) -> bool:
        """Take a row from anything less urgent than `first`; False if there is none to take.

        The `running` completions keep theirs. A server that holds more KV than that of `first` will
        then hold gives way before the latter's own completions do.
        """
        own, giver = first.prompt.owner, self._giver(first)
        if self._forget_spare(own, first.prompt):
            return True
        if giver != own and (
            self._forget_spare(giver, first.prompt)
            or self._evict(giver, running)
            or self._forget_prompt(giver, first.prompt)
        ):
            return True
        return self._evict(own, running, below=first) or self._forget_prompt(own, first.prompt)

    def _giver(self, first: Completion) -> Peer:
        """The server that holds the most KV, if more than that of `first` will with its tokens."""
        held: Counter[Peer] = Counter()
        for completion in self._holders:
            held[completion.prompt.owner] += len(completion)  # its row is to hold all of it
        for prompt in self._kept:
            assert prompt.row is not None
            held[prompt.owner] += self._model.length(prompt.row)
        own = first.prompt.owner
        most = max(held, key=held.__getitem__, default=own)
        return most if held[most] > held[own] + self.missing(first) else own

    def release(self, completion: Completion) -> None:
        """Close the row of a finished completion, or keep it for the prompt if it is the first."""
        prompt = completion.prompt
        row = self._take(completion)
        if row is not None and completion is prompt.completions[0]:
            self._forget(prompt)
            self._keep(prompt, row, completion)
        elif row is not None:
            self._model.close(row)
        self._close_or_spare(prompt)

    def drop(self, completion: Completion) -> None:
        """Close the row of a completion without subscribers."""
        if (row := self._take(completion)) is not None:
            self._model.close(row)
        self._close_or_spare(completion.prompt)

    def hand_over(self, old: Prompt, new: Prompt) -> None:
        """Give the row of a step draft to the one that follows it, as far as they agree.

        `new` begins with the prompt of `old`, and both have one completion.
        """
        (before,), (after,) = old.completions, new.completions
        row = old.row if before.row is None else before.row
        if row is None or after.finished:
            return
        self._take(before)
        self._unkeep(old)
        agreed = min(self._model.length(row), _agreement(new.token_ids, before))
        self._model.truncate(row, min(agreed, len(after) - 1))
        self._give(after, row)

    def take_back(self, step: Prompt) -> None:
        """A step draft that rested goes on, on the row that was kept for it, if it still is."""
        (completion,) = step.completions
        if (row := step.row) is not None:
            self._unkeep(step)
            self._give(completion, row)

    def keep(self, prompt: Prompt, completion: Completion) -> None:
        """Keep the KV of a prompt, which this one's row holds, until all others have rows."""
        if self._model.free_rows and len(prompt.completions) > 1 and completion.row is not None:
            row = self._model.fork(completion.row, len(prompt.token_ids))
            self._forget(prompt)
            self._keep(prompt, row, completion)

    def clear(self, prompt: Prompt) -> None:
        """Give back all rows of the prompt."""
        for completion in prompt.completions:
            if (row := self._take(completion)) is not None:
                self._model.close(row)
        self._forget(prompt)

    def will_share(self, completion: Completion, others: Sequence[Completion]) -> bool:
        """Whether waiting for one of `others`, which are being prefilled, saves work."""
        prompt = completion.prompt
        for other in others:
            if not self._may_share(prompt, other.prompt):
                continue
            covered = 0 if other.row is None else self._model.length(other.row)
            common = _common_prefix(prompt.token_ids, other.prompt.token_ids)
            if common >= covered + SHARED_PREFIX:
                return True
        return False

    def check_integrity(self) -> None:
        """Raise AssertionError unless the model's rows are sound and none is held for nobody."""
        self._model.check_integrity()
        open_rows: list[int] = []
        for prompt in self._turns.prompts.values():
            steps = [s.step_draft for s in prompt.subscriptions.values() if s.step_draft]
            for each in (prompt, *steps):
                assert all(c.row is None for c in each.completions if c.finished), "not returned"
                open_rows += [row for row, _ in _held(each)]
                assert (each.row is not None) == (each in self._kept), "kept, but not there"
                assert (each.row is not None) >= (each in self._spare), "spare, but not there"
                for completion in each.completions:
                    assert (completion.row is not None) == (completion in self._holders)
        assert len(open_rows) == len(set(open_rows)), "a row is held twice"
        assert len(open_rows) == len(self._holders) + len(self._kept), (
            "rows of prompts that are gone"
        )
        assert len(open_rows) == self._model.open_rows, "a row is held for nobody"

    def _source(self, completion: Completion) -> tuple[int | None, int]:
        """An open row to fork, and how much: one with this prompt, or one that begins alike."""
        prompt = completion.prompt
        # One token at least has to be computed, for its logits.
        size = min(len(prompt.token_ids), len(completion) - 1)
        for row, _ in _held(prompt):
            if self._model.length(row) >= size:
                return row, size
        best, shared = None, SHARED_PREFIX - 1
        for row, holder in self._alike(prompt):
            limit = min(self._model.length(row), len(prompt.token_ids) - 1)
            common = min(limit, _agreement(prompt.token_ids, holder))
            if common > shared:
                best, shared = row, common
        return (best, shared) if best is not None else (None, 0)

    def _alike(self, prompt: Prompt) -> Iterator[tuple[int, Completion]]:
        """Rows that may begin as the prompt does: all of its parent's, one of each late prompt."""
        if prompt.parent is not None:
            yield from _held(prompt.parent)
        for other in itertools.islice(reversed(self._turns.prompts.values()), SHARED_AMONG):
            if other not in (prompt, prompt.parent) and self._may_share(prompt, other):
                yield from itertools.islice(_held(other), 1)

    def _may_share(self, prompt: Prompt, other: Prompt) -> bool:
        """Whether the KV of one prompt may serve the other.

        How soon a draft comes tells whether its KV was there: it would tell one server what
        another has been asked.
        """
        return self._share or prompt.owner == other.owner

    def _forget_spare(self, peer: Peer, keep: Prompt) -> bool:
        """Give back the spare row of the server's prompt that is served last."""
        spare = [prompt for prompt in self._spare if prompt.owner == peer and prompt is not keep]
        if not spare:
            return False
        waiting = [(place, prompt) for prompt in spare if (place := prompt.place) is not None]
        self._forget(max(waiting, key=operator.itemgetter(0))[1] if waiting else spare[0])
        return True

    def _evict(
        self, peer: Peer, running: Collection[Completion], below: Completion | None = None
    ) -> bool:
        """Take the row of the server's least urgent completion that is not in `running`.

        With `below` only of one that is less urgent than this one.
        """
        urgency, kept = self._turns.urgency, set(running)
        victims = [
            (urgency(each), each)
            for each in self._holders
            if each.prompt.owner == peer and each not in kept
        ]
        if not victims:
            return False
        worst, victim = max(victims, key=operator.itemgetter(0))
        if below is not None and worst <= urgency(below):
            return False
        row = self._take(victim)
        assert row is not None
        self._model.close(row)
        return True

    def _forget_prompt(self, peer: Peer, keep: Prompt) -> bool:
        """Give back the row of the server's latest prompt that has one of its own."""
        for prompt in reversed(self._kept):
            if prompt.owner == peer and prompt is not keep:
                self._forget(prompt)
                return True
        return False

    def _close_or_spare(self, prompt: Prompt) -> None:
        """Close the prompt's row, or count it as spare, once no completion waits for it.

        It is spare if the prompt's first completion is finished: a step draft may go on from it.
        """
        if prompt.row is None or any(c.row is None and not c.finished for c in prompt.completions):
            return
        if not prompt.completions or prompt.completions[0].finished:
            self._spare[prompt] = None
        else:
            self._forget(prompt)

    def _forget(self, prompt: Prompt) -> None:
        if (row := prompt.row) is not None:
            self._unkeep(prompt)
            self._model.close(row)

    def _keep(self, prompt: Prompt, row: int, text: Completion) -> None:
        prompt.row, prompt.row_text = row, text
        self._kept[prompt] = None

    def _unkeep(self, prompt: Prompt) -> None:
        prompt.row = prompt.row_text = None
        self._kept.pop(prompt, None)
        self._spare.pop(prompt, None)

    def _give(self, completion: Completion, row: int) -> None:
        completion.row = row
        self._holders[completion] = None

    def _take(self, completion: Completion) -> int | None:
        row, completion.row = completion.row, None
        self._holders.pop(completion, None)
        return row


def _held(prompt: Prompt) -> Iterator[tuple[int, Completion]]:
    """The prompt's rows, each with the completion whose beginning it may hold."""
    if prompt.row is not None and prompt.row_text is not None:
        yield prompt.row, prompt.row_text
    for completion in prompt.completions:
        if completion.row is not None:
            yield completion.row, completion


def _agreement(token_ids: array[int], completion: Completion) -> int:
    """Length of the common prefix of a text and a completion with its prompt, in tokens."""
    prompt = completion.prompt.token_ids
    common = _common_prefix(token_ids, prompt)
    if common < len(prompt):
        return common
    return common + _common_prefix(token_ids[common:], completion.token_ids)


def _common_prefix(a: array[int], b: array[int]) -> int:
    """Length of the common prefix, in tokens."""
    size = min(len(a), len(b))
    if not size:
        return 0
    differ = np.frombuffer(a, np.int32, size) != np.frombuffer(b, np.int32, size)
    first = int(differ.argmax())
    return first if differ[first] else size
