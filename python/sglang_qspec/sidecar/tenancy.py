"""Which completions hold rows of the draft model, and who has to give way when there are none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sglang_qspec.sidecar.line import Line
from sglang_qspec.sidecar.prompt import Completion, Prompt
from sglang_qspec.sidecar.rows import Rows

SHARED_PREFIX = 16
"""Prompts share the KV of a common prefix at least so long, in tokens."""
SHARED_AMONG = 32
"""How many of the latest prompts are searched for a common prefix."""
HEADROOM = 16
"""A completion is seated only if all that are advanced can grow by so many tokens."""


class Tenancy:
    """Owns the model's rows: each belongs to a completion, or keeps a prompt for its completions.

    When rows or KV run short, the least urgent completions lose theirs; what they have drafted
    stays, and its KV is computed again when their turn comes.
    """

    def __init__(self, model: Rows, line: Line) -> None:
        self._model = model
        self._line = line

    def missing(self, completion: Completion) -> int:
        """Tokens of prompt and completion that its row does not cover; at least 1."""
        covered = 0 if completion.row is None else self._model.length(completion.row)
        return len(completion) - covered

    def seat(self, completion: Completion, running: int) -> bool:
        """Give the completion a row; False if it has to wait for KV.

        Nothing less urgent than it keeps a row that it needs. `running` other completions grow
        beside it; with none, it is seated however little KV there is.
        """
        while True:
            source, shared = self._source(completion)
            wanted = len(completion) - shared + HEADROOM * running
            enough = not running or wanted <= self._model.free_tokens
            if self._model.free_rows and enough:
                break
            if not self._evict_below(completion) and not self._forget_prompt(completion.prompt):
                return False
        completion.row = self._model.open() if source is None else self._model.fork(source, shared)
        self._release(completion.prompt)
        return True

    def make_room(self, first: Completion) -> bool:
        """Take some KV from anyone but `first`; False if there is none to take."""
        return self._evict_below(first) or self._forget_prompt(first.prompt)

    def vacate(self, completion: Completion) -> None:
        """The completion needs its row no longer, or loses it."""
        if completion.row is not None:
            self._model.close(completion.row)
            completion.row = None
        self._release(completion.prompt)

    def keep(self, prompt: Prompt, row: int) -> None:
        """Keep the KV of a prompt, which `row` holds, until all its completions are seated."""
        if self._model.free_rows and len(prompt.completions) > 1:
            prompt.row = self._model.fork(row, len(prompt.token_ids))

    def clear(self, prompt: Prompt) -> None:
        """Give back all rows of the prompt."""
        for completion in prompt.completions:
            if completion.row is not None:
                self._model.close(completion.row)
                completion.row = None
        self._forget(prompt)

    def will_share(self, completion: Completion, others: Sequence[Completion]) -> bool:
        """Whether waiting for one of `others`, which are being prefilled, saves work."""
        prompt = completion.prompt.token_ids
        for other in others:
            covered = 0 if other.row is None else self._model.length(other.row)
            if _common_prefix(prompt, other.prompt.token_ids) >= covered + SHARED_PREFIX:
                return True
        return False

    def check_integrity(self) -> None:
        """Raise AssertionError unless the model's rows are sound and none is held for nobody."""
        self._model.check_integrity()
        for prompt in self._line.prompts.values():
            held = [c.row for c in prompt.completions if c.row is not None]
            assert all(c.row is None for c in prompt.completions if c.finished), "row not returned"
            for row in held + ([prompt.row] if prompt.row is not None else []):
                assert self._model.length(row) >= 0

    def _source(self, completion: Completion) -> tuple[int | None, int]:
        """An open row to fork, and how much: one with this prompt, or one that begins alike."""
        prompt = completion.prompt
        size = len(prompt.token_ids)
        for row in (prompt.row, *(c.row for c in prompt.completions)):
            if row is not None and self._model.length(row) >= size:
                return row, size
        best, shared = None, SHARED_PREFIX - 1
        for other in itertools.islice(reversed(self._line.prompts.values()), SHARED_AMONG):
            for row in (other.row, *(c.row for c in other.completions)):
                if row is None or other is prompt:
                    continue
                # One token at least has to be computed, for its logits.
                limit = min(self._model.length(row), size - 1)
                common = min(limit, _common_prefix(prompt.token_ids, other.token_ids))
                if common > shared:
                    best, shared = row, common
                break
        return (best, shared) if best is not None else (None, 0)

    def _evict_below(self, completion: Completion) -> bool:
        """Take the row of the least urgent completion, if it is less urgent than this one."""
        for victim in self._line.patient():
            if victim is completion:
                return False
            if victim.row is not None:
                self._model.close(victim.row)
                victim.row = None
                return True
        return False

    def _forget_prompt(self, keep: Prompt) -> bool:
        """Give back the row of the latest prompt that has one of its own."""
        for prompt in reversed(self._line.prompts.values()):
            if prompt.row is not None and prompt is not keep:
                self._forget(prompt)
                return True
        return False

    def _release(self, prompt: Prompt) -> None:
        if all(c.finished or c.row is not None for c in prompt.completions):
            self._forget(prompt)

    def _forget(self, prompt: Prompt) -> None:
        if prompt.row is not None:
            self._model.close(prompt.row)
            prompt.row = None


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens the two begin with in common, by bisection over list comparisons."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
