"""Runs a benchmark: serves the cells that its journal lacks, and reports the measured cells.

The session writes each measured cell to `runs.jsonl` in the output folder at once. After an
interrupt the same command with `--resume` continues the run. With `--report-only` it reports and
draws the measured cells. If a cell fails, a new server serves it once more; after a second failure
the session leaves the configuration out. The line of JSON has the reasons in `failed`, and the exit
code is 1. In that line `..._spread` of a ratio has the smallest and largest round, or null for one
round, and `..._rounds` has the number of rounds. `harness.summary` lists the figures of its `rows`.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.harness import charts
from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import Journal, JournalError, digest
from benchmark.harness.machine import machine, provenance, versions
from benchmark.harness.output import say, write
from benchmark.harness.report import HTML, Report
from benchmark.harness.run import Run
from benchmark.harness.server import Server, reason
from sglang_qspec.tools.picture import INSTALL

ATTEMPTS = 2
Measure = Callable[[Server, Cell], Run]


class Session:
    """Serves cells and writes their runs to a folder, which a later session can continue.

    Ends the process with a message if the folder holds another run.
    """

    def __init__(
        self,
        name: str,
        options: Namespace,
        settings: Settings,
        shown: Mapping[str, object],
        load: object = None,
        leaves_out: Callable[[Cell], str] = lambda cell: cell.config,
    ) -> None:
        """`options` are those of `add_run`.

        A run can be resumed only with the same `settings`, `load` and options `shown`, which the
        results show. After a cell has failed, the session skips all cells with the same
        `leaves_out`, by default the same configuration.
        """
        self.failed: dict[str, str] = {}
        """Reasons of failures, by what `leaves_out` names."""
        self._leaves_out = leaves_out
        self.folder = options.output or Path(tempfile.mkdtemp(prefix=f"{name}_"))
        self._interrupted = False
        self._report_only = options.report_only
        self._settings = settings
        self._shown = shown
        asked = {option: str(value) for option, value in shown.items()}
        header = {**asked, "load": digest(load), **settings.shown, **versions()}
        header["machine"] = machine()
        try:
            resume = options.resume or options.report_only
            self.journal = Journal.open(self.folder, header, resume)
        except JournalError as error:
            sys.exit(f"{name}: error: {error}")
        say(f"results go to {self.folder}")

    def serve(
        self,
        cells: Sequence[Cell],
        configuration: Callable[[Cell], Configuration],
        measure: Measure,
    ) -> None:
        """Serve the cells that the journal lacks, until an interrupt; none with --report-only."""
        if self._report_only:
            return
        left = [cell for cell in cells if cell not in self.journal.runs]
        try:
            with Fleet(not self._settings.on_gpu) as fleet:
                for cell in tqdm(left, unit="cell", file=sys.stderr):
                    if self._leaves_out(cell) not in self.failed:
                        self._serve(fleet, cell, configuration(cell), measure)
        except KeyboardInterrupt:
            self._interrupted = True
            say("interrupted; --resume continues this run")

    def _serve(
        self, fleet: Fleet, cell: Cell, configuration: Configuration, measure: Measure
    ) -> None:
        for _ in range(ATTEMPTS):
            server = None
            try:
                server = fleet.run(configuration)
                run = measure(server, cell)
            # RuntimeError: a ServerError, or a sidecar that is not ready or does not draft.
            except (RuntimeError, OSError) as error:
                failure = error if server is None else server.explain(error)
                why = reason(failure)
                say(f"{cell}: failed: {failure}")
                fleet.drop(configuration)
            else:
                self.journal.add(cell, run)
                say(f"{cell}: {run.tokens_per_s:.1f} tokens/s")
                return
        self.failed[self._leaves_out(cell)] = why

    def finish(self, report: Report, record: Mapping[str, Any], **facts: object) -> int:
        """Write the report, print its tables and the line of JSON; returns the exit code.

        The session adds the failures, and what was run and where, to the report and the record. The
        exit code is 0 only if cells were measured and no configuration failed.
        """
        what = {**provenance(), "settings": self._settings.shown, **self._shown, **facts}
        report = replace(report, facts=what, failed=self.failed)
        page = self.folder / "report.md"
        page.write_text(report.markdown(), encoding="utf-8")
        if report.charts:
            page = self.folder / HTML
            page.write_text(report.html(), encoding="utf-8")
        print(f"\n{report.text()}\n\nreport: {page}")
        if not report.charts and not charts.available():
            print(f"figures need matplotlib: {INSTALL}, then --report-only")
        whole = {**record, "failed": self.failed, **what}
        write(self.folder, whole, report.figures)
        print(json.dumps(whole))
        if self._interrupted:
            return 130
        return 1 if self.failed or not self.journal.runs else 0


def rounded_up(tokens: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `tokens`."""
    return math.ceil(tokens / step) * step
