"""Assigns the draft model's KV rows to completions, and evicts rows when rows or KV run out."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sglang_qspec.link import Peer
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.subscription import StepDraft
from sglang_qspec.sidecar.text import Completion, Text

SHARED_PREFIX = 16
"""Minimum length, in tokens, of a common prefix for prompts to share its KV."""
SHARED_AMONG = 32
"""Number of newest prompts that are searched for a common prefix."""
HEADROOM = 16
"""Number of free KV slots per running completion that is required before another gets a row."""


class RowAllocator:
    """Owns the model's KV rows, which completions hold or prompts keep.

    When the first completion of a prompt finishes, the prompt keeps its row, because a step draft
    can continue from it. When rows or KV slots run out, the allocator first evicts these spare
    rows, starting with the prompt that is served last. Next the least urgent completions lose their
    rows. These completions keep their tokens, and the model recomputes the KV when it drafts them
    again. A server's rows are evicted only for its own completions, or while it holds more KV than
    the server that needs a row.

    Prompts of one server and one scope share KV; with `share`, prompts of all servers do unless
    they have a scope.
    """

    def __init__(self, rows: KVRows, queue: FairQueue, *, share: bool = False) -> None:
        self._rows = rows
        self._queue = queue
        self._share = share
        self._holders: dict[Completion, None] = {}
        """Completions that hold a row, in the order in which they got it."""
        self._kept: dict[Text, None] = {}
        """Prompts that keep a row, in the order in which they got it."""
        self._spare: dict[Text, None] = {}
        """Prompts in `_kept` with no completion that waits for the row."""

    def missing(self, completion: Completion) -> int:
        """Number of tokens of prompt and completion without KV in its row; at least 1."""
        covered = 0 if completion.row is None else self._rows.length(completion.row)
        return len(completion) - covered

    def allocate(
        self, completion: Completion, running: Collection[Completion], reserved: int
    ) -> bool:
        """Give the completion a row; return False if it must wait for KV slots.

        Evicts less urgent completions as needed, but never the `running` ones, which are in the
        same pass. The pass needs `reserved` KV slots for them, and each gets HEADROOM slots to
        grow. If no completion is running, free KV slots are not required.
        """
        while True:
            source, shared = self._source(completion)
            wanted = len(completion) - shared + HEADROOM * len(running) + reserved
            enough = not running or wanted <= self._rows.free_slots
            if self._rows.free_rows and enough:
                break
            if not self.make_room(completion, running):
                return False
        row = self._rows.open() if source is None else self._rows.fork(source, shared)
        self._give(completion, row)
        self._close_or_spare(completion.text)
        return True

    def make_room(self, first: Completion, running: Collection[Completion] = ()) -> bool:
        """Evict one row for `first`; return False if no row may be evicted.

        Rows of `running` completions are never evicted. It tries a spare row of the same server
        first, then a row of the server with the most KV. Last comes a row of the same server that
        is less urgent than `first`.
        """
        own, giver = first.text.owner, self._giver(first)
        if self._forget_spare(own, first.text):
            return True
        if giver != own and (
            self._forget_spare(giver, first.text)
            or self._evict(giver, running)
            or self._forget_prompt(giver, first.text)
        ):
            return True
        return self._evict(own, running, below=first) or self._forget_prompt(own, first.text)

    def _giver(self, first: Completion) -> Peer:
        """Return the server that must give up a row: the one that holds the most KV.

        The result is the server of `first`, unless another server holds more KV than the server of
        `first` will hold with `first`.
        """
        held: Counter[Peer] = Counter()
        for completion in self._holders:
            held[completion.text.owner] += len(completion)  # its row will cover all tokens
        for prompt in self._kept:
            assert prompt.row is not None
            held[prompt.owner] += self._rows.length(prompt.row)
        own = first.text.owner
        most = max(held, key=held.__getitem__, default=own)
        return most if held[most] > held[own] + self.missing(first) else own

    def release(self, completion: Completion) -> None:
        """Close the row of a finished completion, or keep it for the prompt if it is the first."""
        prompt = completion.text
        row = self._take(completion)
        if row is not None and completion is prompt.completions[0]:
            self._forget(prompt)
            self._keep(prompt, row, completion)
        elif row is not None:
            self._rows.close(row)
        self._close_or_spare(prompt)

    def drop(self, completion: Completion) -> None:
        """Close the row of a completion without subscribers."""
        if (row := self._take(completion)) is not None:
            self._rows.close(row)
        self._close_or_spare(completion.text)

    def hand_over(self, old: StepDraft, new: StepDraft) -> None:
        """Move the row of a step draft to the step draft that replaces it.

        The row keeps the KV of their common prefix. The text of `new` begins with the text of
        `old`.
        """
        before, after = old.completion, new.completion
        row = old.row if before.row is None else before.row
        if row is None or after.finished:
            return
        self._take(before)
        self._unkeep(old)
        agreed = min(self._rows.length(row), _agreement(new.token_ids, before))
        self._rows.truncate(row, min(agreed, len(after) - 1))
        self._give(after, row)

    def take_back(self, step: StepDraft) -> None:
        """Give a paused step draft its kept row back, unless the row was evicted."""
        if (row := step.row) is not None:
            self._unkeep(step)
            self._give(step.completion, row)

    def keep(self, prompt: Text, completion: Completion) -> None:
        """Keep a row with the prompt's KV, forked from this completion's, for the others."""
        if self._rows.free_rows and len(prompt.completions) > 1 and completion.row is not None:
            row = self._rows.fork(completion.row, len(prompt.token_ids))
            self._forget(prompt)
            self._keep(prompt, row, completion)

    def clear(self, prompt: Text) -> None:
        """Close all rows of the prompt and its completions."""
        for completion in prompt.completions:
            if (row := self._take(completion)) is not None:
                self._rows.close(row)
        self._forget(prompt)

    def will_share(self, completion: Completion, others: Sequence[Completion]) -> bool:
        """Whether one of `others`, which are in prefill, will have KV that saves work here."""
        prompt = completion.text
        for other in others:
            if not self._may_share(prompt, other.text):
                continue
            covered = 0 if other.row is None else self._rows.length(other.row)
            common = _common_prefix(prompt.token_ids, other.text.token_ids)
            if common >= covered + SHARED_PREFIX:
                return True
        return False

    def check_integrity(self) -> None:
        """Raise AssertionError unless each open row has one holder and the records agree."""
        self._rows.check_integrity()
        open_rows: list[int] = []
        for prompt in self._queue.prompts.values():
            steps = [s.step_draft for s in prompt.subscriptions.values() if s.step_draft]
            for each in (prompt, *steps):
                assert all(c.row is None for c in each.completions if c.finished), (
                    "a finished completion holds a row"
                )
                open_rows += [row for row, _ in _held(each)]
                assert (each.row is not None) == (each in self._kept), "a kept row is not recorded"
                assert (each.row is not None) >= (each in self._spare), "a spare prompt has no row"
                for completion in each.completions:
                    assert (completion.row is not None) == (completion in self._holders)
        assert len(open_rows) == len(set(open_rows)), "a row has two holders"
        assert len(open_rows) == len(self._holders) + len(self._kept), (
            "a dropped prompt holds a row"
        )
        assert len(open_rows) == self._rows.open_rows, "an open row has no holder"

    def _source(self, completion: Completion) -> tuple[int | None, int]:
        """Return an open row to fork and the number of its tokens to share; (None, 0) if none.

        A row of the same prompt is preferred, then the row with the longest common prefix.
        """
        prompt = completion.text
        # The model must compute at least the last token, for its logits.
        size = min(len(prompt.token_ids), len(completion) - 1)
        for row, _ in _held(prompt):
            if self._rows.length(row) >= size:
                return row, size
        best, shared = None, SHARED_PREFIX - 1
        for row, holder in self._alike(prompt):
            limit = min(self._rows.length(row), len(prompt.token_ids) - 1)
            common = min(limit, _agreement(prompt.token_ids, holder))
            if common > shared:
                best, shared = row, common
        return (best, shared) if best is not None else (None, 0)

    def _alike(self, prompt: Text) -> Iterator[tuple[int, Completion]]:
        """Rows that may share a prefix: all rows of the parent, one row of each newest prompt."""
        if prompt.parent is not None:
            yield from _held(prompt.parent)
        for other in itertools.islice(reversed(self._queue.prompts.values()), SHARED_AMONG):
            if other not in (prompt, prompt.parent) and self._may_share(prompt, other):
                yield from itertools.islice(_held(other), 1)

    def _may_share(self, prompt: Text, other: Text) -> bool:
        """Whether two prompts may share KV.

        Draft latency reveals whether KV was shared. It would reveal the prompts of one server to
        another, or those of one scope to the requests of another scope.
        """
        if prompt.scope or other.scope:
            return (prompt.owner, prompt.scope) == (other.owner, other.scope)
        return self._share or prompt.owner == other.owner

    def _forget_spare(self, peer: Peer, keep: Text) -> bool:
        """Close the spare row of the server's prompt that is served last; False if none."""
        spare = [prompt for prompt in self._spare if prompt.owner == peer and prompt is not keep]
        if not spare:
            return False
        waiting = [(place, prompt) for prompt in spare if (place := prompt.place) is not None]
        self._forget(max(waiting, key=operator.itemgetter(0))[1] if waiting else spare[0])
        return True

    def _evict(
        self, peer: Peer, running: Collection[Completion], below: Completion | None = None
    ) -> bool:
        """Close the row of the server's least urgent completion that is not in `running`.

        With `below`, only if the completion is less urgent than `below`. Returns False if no row
        was closed.
        """
        urgency, kept = self._queue.urgency, set(running)
        victims = [
            (urgency(each), each)
            for each in self._holders
            if each.text.owner == peer and each not in kept
        ]
        if not victims:
            return False
        worst, victim = max(victims, key=operator.itemgetter(0))
        if below is not None and worst <= urgency(below):
            return False
        row = self._take(victim)
        assert row is not None
        self._rows.close(row)
        return True

    def _forget_prompt(self, peer: Peer, keep: Text) -> bool:
        """Close the server's newest kept row, except `keep`'s; False if there is no other."""
        for prompt in reversed(self._kept):
            if prompt.owner == peer and prompt is not keep:
                self._forget(prompt)
                return True
        return False

    def _close_or_spare(self, prompt: Text) -> None:
        """Close the prompt's kept row, or mark it as spare, once no completion waits for it.

        The row becomes spare if the first completion is finished, because a step draft may continue
        from it.
        """
        if prompt.row is None or any(c.row is None and not c.finished for c in prompt.completions):
            return
        if not prompt.completions or prompt.completions[0].finished:
            self._spare[prompt] = None
        else:
            self._forget(prompt)

    def _forget(self, prompt: Text) -> None:
        if (row := prompt.row) is not None:
            self._unkeep(prompt)
            self._rows.close(row)

    def _keep(self, prompt: Text, row: int, text: Completion) -> None:
        prompt.row, prompt.row_text = row, text
        self._kept[prompt] = None

    def _unkeep(self, prompt: Text) -> None:
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


def _held(prompt: Text) -> Iterator[tuple[int, Completion]]:
    """The prompt's rows, each with a completion that has the text of the row as a prefix."""
    if prompt.row is not None and prompt.row_text is not None:
        yield prompt.row, prompt.row_text
    for completion in prompt.completions:
        if completion.row is not None:
            yield completion.row, completion


def _agreement(token_ids: array[int], completion: Completion) -> int:
    """Length of the common prefix of a text and a completion with its prompt, in tokens."""
    prompt = completion.text.token_ids
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
