"""What the next pass of the draft model advances."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from sglang_qspec.sidecar.line import Line
from sglang_qspec.sidecar.prompt import Completion
from sglang_qspec.sidecar.rows import Rows
from sglang_qspec.sidecar.tenancy import Tenancy

REDRAFT_SLOTS = 8
"""Completions in a pass with a redraft, at most: a small pass is a quick one, and a redraft is of
use only while it runs ahead of its target."""
REACH = 4
"""How many times the slots of completions are looked at to fill a pass."""


@dataclass
class Plan:
    """The completions to advance. All have rows, and there is KV for what is added to them."""

    prefill: list[Completion] = field(default_factory=list)
    """Those with more than one token to read first."""
    decode: list[Completion] = field(default_factory=list)
    to_read: int = 0
    """Tokens that `prefill` lacks."""

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)


class Planner:
    """Fills passes with the first completions of the line that can be advanced."""

    def __init__(
        self,
        model: Rows,
        line: Line,
        tenancy: Tenancy,
        *,
        slots: int,
        prefill_tokens: int,
        firsts_apart: bool,
    ) -> None:
        """The settings are as in `QueueDrafter`."""
        self._model = model
        self._line = line
        self._tenancy = tenancy
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._firsts_apart = firsts_apart

    def plan(self) -> Plan | None:
        """The next pass; None when even the first completion alone is too large for the KV."""
        while True:
            plan = self._fill()
            needed = len(plan.decode) + min(plan.to_read, self._prefill_tokens)
            if needed <= self._model.free_tokens:
                return plan
            if not self._tenancy.make_room(next(self._line.urgent())):
                return None

    def _fill(self) -> Plan:
        plan = Plan()
        slots = self._slots
        for completion in itertools.islice(self._line.urgent(), REACH * self._slots):
            if len(plan) >= slots or (completion.index and self._keeps_apart(plan)):
                break
            if completion.prompt.parent is not None:
                if len(plan) >= REDRAFT_SLOTS:
                    continue
                slots = min(slots, REDRAFT_SLOTS)
            if completion.row is None:
                if plan.to_read >= self._prefill_tokens or self._waits(completion, plan):
                    continue
                if not self._tenancy.seat(completion, len(plan), plan.to_read):
                    break
            missing = self._tenancy.missing(completion)
            if missing == 1:
                plan.decode.append(completion)
            else:
                plan.prefill.append(completion)
                plan.to_read += missing
        return plan

    def _keeps_apart(self, plan: Plan) -> bool:
        """Whether the pass is for first completions and redrafts alone."""
        if not self._firsts_apart:
            return False
        return any(completion.index == 0 for completion in (*plan.prefill, *plan.decode))

    def _waits(self, completion: Completion, plan: Plan) -> bool:
        """Whether one that is being read will soon have KV that this one can share."""
        first = completion.prompt.completions[0]
        if completion is not first and not first.finished and not first.token_ids:
            return True  # all completions of a prompt begin when it is read
        return self._tenancy.will_share(completion, plan.prefill)
