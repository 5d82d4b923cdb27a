"""What a server counts of its passes and its sidecar's, over an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.config import PIPELINES

NAMES = ("queue", *PIPELINES)
"""Of the pipelines that a pass counts under, each under one."""


class CounterError(RuntimeError):
    """The server or its sidecar was started anew, so that the interval cannot be told."""


@dataclass(frozen=True)
class Passes:
    """Verify passes of one pipeline."""

    passes: int = 0
    requests: int = 0
    """Summed over the passes, as are the rows."""
    rows: int = 0
    """Tokens that the passes had, those that only pad included."""
    seconds: float = 0.0
    """From the end of the pass before, or the beginning if a prompt was read; without waits."""
    waited_seconds: float = 0.0
    """In which the target waited for drafts."""

    def since(self, before: Passes) -> Passes:
        return Passes(
            self.passes - before.passes,
            self.requests - before.requests,
            self.rows - before.rows,
            self.seconds - before.seconds,
            self.waited_seconds - before.waited_seconds,
        )

    def plus(self, other: Passes) -> Passes:
        return Passes(
            self.passes + other.passes,
            self.requests + other.requests,
            self.rows + other.rows,
            self.seconds + other.seconds,
            self.waited_seconds + other.waited_seconds,
        )


@dataclass(frozen=True)
class Counters:
    """Since the server's start, or over an interval."""

    pipelines: Mapping[str, Passes]
    """By the name that the server gives it."""
    step_seconds: float
    """In which the sidecar's model drafted for served requests."""
    step_tokens: int
    step_passes: int

    @property
    def total(self) -> Passes:
        """Over all pipelines."""
        total = Passes()
        for passes in self.pipelines.values():
            total = total.plus(passes)
        return total

    def since(self, before: Counters) -> Counters:
        """What was counted after `before`. Raises CounterError if less is counted now."""
        found = Counters(
            {
                name: passes.since(before.pipelines.get(name, Passes()))
                for name, passes in self.pipelines.items()
            },
            self.step_seconds - before.step_seconds,
            self.step_tokens - before.step_tokens,
            self.step_passes - before.step_passes,
        )
        if found.step_passes < 0 or any(p.passes < 0 for p in found.pipelines.values()):
            raise CounterError("the server or its sidecar was started anew meanwhile")
        return found


def read_counters(state: Mapping[str, Any]) -> Counters:
    """From `internal_states[0]["qspec"]` of /server_info."""
    fields = ("passes", "requests", "rows", "seconds", "waited_seconds")
    return Counters(
        {
            name: Passes(**{field: counts[field] for field in fields})
            for name, counts in state["pipelines"].items()
            if name in NAMES
        },
        state["step_seconds"],
        state["step_tokens"],
        state["step_passes"],
    )
