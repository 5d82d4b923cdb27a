"""What a run has measured, by block and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.harness import journal
from benchmark.worst.cases import Block
from benchmark.worst.serving import CellRun


@dataclass(frozen=True)
class Entry:
    """A line: one configuration's run of a block."""

    round: int
    case: str
    running: int
    config: str
    run: CellRun


class Journal(journal.Journal[Entry]):
    """Of runs of cells."""

    kind = Entry

    def holds(self, block: Block, config: str) -> bool:
        """Whether this configuration has served this block."""
        key = (block.round, block.case, block.running, config)
        return any((e.round, e.case, e.running, e.config) == key for e in self.entries)
