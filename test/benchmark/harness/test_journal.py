"""The journal that a run writes to disk, and that a later run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.journal import FILE, Journal, JournalError
from benchmark.harness.run import Run
from benchmark.parallel import plan
from benchmark.queueing.load import Cell
from test.benchmark.parallel.cells import block_runs
from test.benchmark.runs import answer, run

HEADER = {"load": "a1", "dtype": "float32"}
CELL = Cell(1, "qa", 0, "lookup")
RUN = run(answer(3, passes=2, proposed=4, accepted={"prompt": 1}), drafted=8)


def opened(folder: Path, resume: bool = True, **header: str) -> Journal[Cell]:
    return Journal.open(folder, {**HEADER, **header}, resume, Cell)


def written(folder: Path) -> None:
    journal = opened(folder, resume=False)
    journal.add(CELL, RUN)
    journal.add(Cell(1, "qa", 1, "none"), run(answer(3)))


def test_a_resumed_journal_has_the_cells_that_were_added(tmp_path: Path) -> None:
    written(tmp_path)
    runs = opened(tmp_path).runs
    assert runs[CELL] == RUN
    assert list(runs) == [CELL, Cell(1, "qa", 1, "none")]


def test_cells_of_all_kinds_can_be_read(tmp_path: Path) -> None:
    runs: dict[plan.Cell, Run] = block_runs()
    journal = Journal.open(tmp_path, HEADER, False, plan.Cell)
    for cell, found in runs.items():
        journal.add(cell, found)
    assert Journal.open(tmp_path, HEADER, True, plan.Cell).runs == runs


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    journal = opened(tmp_path)
    assert list(journal.runs) == [CELL]
    journal.add(Cell(2, "qa", 0, "none"), RUN)
    assert len(opened(tmp_path).runs) == 2


def test_a_run_is_not_overwritten_and_not_mixed_with_another(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(JournalError, match="continue that run with --resume"):
        opened(tmp_path, resume=False)
    with pytest.raises(JournalError, match=r"its dtype is float32, and bfloat16 in this run"):
        opened(tmp_path, dtype="bfloat16")
