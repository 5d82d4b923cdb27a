"""Computes the figures of each configuration of `bench_queue`, over the blocks that all served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.harness.cells import Cell
from benchmark.harness.run import Run, joined
from benchmark.harness.statistics import Ratio, ratio_record
from benchmark.harness.summary import Summary
from benchmark.queueing.configurations import ALL_CORES, BASELINE, BASELINE_ALL_CORES, LARGEST

GROUP_FIGURES = ("accept_len", "match_rate", "tokens_per_s")


class Blocks:
    """The blocks that all configurations have served, so all rows have the same prompts."""

    def __init__(self, runs: Mapping[Cell, Run], configs: Sequence[str]) -> None:
        """`configs` are all configurations that did not fail."""
        served: dict[tuple[int, object], dict[str, Cell]] = {}
        for cell in runs:
            served.setdefault((cell.round, cell.load), {})[cell.config] = cell
        whole = [block for block in served.values() if configs and block.keys() >= set(configs)]
        self.count = len(whole)
        """Number of the blocks, over all rounds."""
        found = {block[config]: runs[block[config]] for block in whole for config in configs}
        self.every = _joined(found, configs)
        """The rows of all blocks of a round together."""
        self.by_group = _joined(found, configs, "group")
        """The rows of the blocks of each group."""

    @property
    def groups(self) -> list[str]:
        return self.by_group.values("group")

    def equal_hardware(self, config: str) -> Ratio | None:
        """Tokens per second over no speculation; both have the cores of target and sidecar."""
        return self.every.ratio(ALL_CORES.get(config, config), BASELINE_ALL_CORES, {})

    def record(self) -> dict[str, Any]:
        """For JSON: all rows, and the ratio at equal hardware of the most completions."""
        rows = []
        for row in self.every.rows:
            groups: dict[str, Any] = {}
            for group in self.groups:
                if (one := self.by_group.row(row.config, {"group": group})) is not None:
                    figures = one.record()
                    kept = (key for key in figures if key in GROUP_FIGURES or "speedup" in key)
                    groups[group] = {key: figures[key] for key in kept}
            equal = ratio_record("equal_hardware_speedup", self.equal_hardware(row.config))
            rows.append({**row.record(), **equal, "by_group": groups})
        return {
            "rows": rows,
            **ratio_record("equal_hardware_speedup", self.equal_hardware(LARGEST)),
        }


def _joined(runs: Mapping[Cell, Run], configs: Sequence[str], *dimensions: str) -> Summary:
    """A summary of the joined runs of each round, with these dimensions alone."""
    found: dict[Cell, list[Run]] = {}
    for cell, run in runs.items():
        load = {name: cell[name] for name in dimensions}
        found.setdefault(Cell.of(cell.round, cell.config, **load), []).append(run)
    return Summary({cell: joined(parts) for cell, parts in found.items()}, BASELINE, configs)
