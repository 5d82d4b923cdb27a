"""What a run has measured, by configuration and block."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark.harness import journal
from benchmark.queueing.serving import BlockRun


@dataclass(frozen=True)
class Entry:
    """A line: one configuration's run of one block."""

    round: int
    """From 1."""
    config: str
    run: BlockRun


class Journal(journal.Journal[Entry]):
    """Of runs of blocks."""

    kind = Entry

    def holds(self, number: int, config: str, group: str, part: int) -> bool:
        """Whether this configuration has served this block in this round."""
        return any(
            (entry.round, entry.config, entry.run.group, entry.run.part)
            == (number, config, group, part)
            for entry in self.entries
        )
