"""A run: every cell that has not been measured yet, on the server that is its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.harness.configuration import Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.output import say
from benchmark.harness.server import reason
from benchmark.parallel.journal import Entry, Journal
from benchmark.parallel.plan import Block, prompts_of, running
from benchmark.parallel.servers import server_for
from benchmark.parallel.serving import CellRun, Task, serve

TYPICAL_TOKENS_PER_S = 80.0
"""For the time that a run may take, until it has measured that."""


@dataclass(frozen=True)
class Step:
    """A cell of a block."""

    block: Block
    task: Task

    def __str__(self) -> str:
        task = self.task
        streamed = ", streamed" if task.streamed else ""
        return f"{task.running} in flight, k = {task.k}, {task.config}{streamed}"


def steps_of(
    blocks: Sequence[Block], prompts: Sequence[str], per_slot: int, max_new_tokens: int
) -> list[Step]:
    """Of all blocks, in their order."""
    return [
        Step(
            block,
            Task(
                config,
                block.k,
                running(config, block.in_flight),
                prompts_of(block, prompts, per_slot),
                max_new_tokens,
                block.streamed,
            ),
        )
        for block in blocks
        for config in block.configs
    ]


class Run:
    """Serves steps; what the journal holds already is left out.

    `width` is the widest pass that the server with a sidecar can be set to, in tokens of a request.
    """

    def __init__(
        self, settings: Settings, width: int, steps: Sequence[Step], journal: Journal
    ) -> None:
        self.failed: dict[str, str] = {}
        """Why configurations were left out."""
        self._settings = settings
        self._width = width
        self._steps = steps
        self._journal = journal
        self._seconds, self._tokens = 0.0, 0

    def serve(self, fleet: Fleet) -> None:
        steps = [s for s in self._steps if not self._journal.holds(s.block, s.task.config)]
        say(f"{len(steps)} cells, {self._left(steps)}")
        for place, step in enumerate(steps, 1):
            if step.task.config in self.failed:
                continue
            began = time.monotonic()
            run = self._serve(fleet, step)
            if run is None:
                continue
            block = step.block
            key = (block.round, block.in_flight, block.k, block.streamed, step.task.config)
            self._journal.add(Entry(*key, run))
            self._seconds += time.monotonic() - began
            self._tokens += run.tokens
            say(
                f"[{place}/{len(steps)}] {step}: {run.tokens_per_s:.1f} tokens/s, "
                f"{run.decode_tokens_per_s:.1f} decoding; {self._left(steps[place:])}"
            )

    def _left(self, steps: Sequence[Step]) -> str:
        per_s = self._tokens / self._seconds if self._seconds else TYPICAL_TOKENS_PER_S
        tokens = sum(len(step.task.prompts) * step.task.max_new_tokens for step in steps)
        return f"about {tokens / per_s / 60:.0f} min to go"

    def _serve(self, fleet: Fleet, step: Step) -> CellRun | None:
        """None if it failed twice, the second time on a new server."""
        chosen = server_for(step.task.config, self._settings, self._width)
        why = ""
        for _ in range(2):
            server = None
            try:
                server = fleet.run(chosen)
                return serve(server, step.task)
            # ServerError is one; so is a sidecar that is not ready in time.
            except (RuntimeError, OSError) as error:
                failure = error if server is None else server.explain(error)
                why = reason(failure)
                say(f"{step}: failed: {failure}")
                fleet.drop(chosen)
        self.failed[step.task.config] = why
        return None
