"""What a run has measured, by block and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.harness import journal
from benchmark.parallel.plan import BASELINES, Block
from benchmark.parallel.serving import CellRun


@dataclass(frozen=True)
class Entry:
    """A line: one configuration's run of a block's prompts."""

    round: int
    """Of the block, as are the next three."""
    in_flight: int
    k: int
    streamed: bool
    config: str
    run: CellRun


class Journal(journal.Journal[Entry]):
    """Of runs of cells."""

    kind = Entry

    def holds(self, block: Block, config: str) -> bool:
        """Whether this configuration has served this block; a baseline is the same for all k."""
        return any(
            (entry.round, entry.in_flight, entry.streamed, entry.config)
            == (block.round, block.in_flight, block.streamed, config)
            and (entry.k == block.k or config in BASELINES)
            for entry in self.entries
        )
