"""The journal that a run writes to disk, and that a later run resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.cells import Cell
from benchmark.harness.journal import FILE, Journal, JournalError
from test.benchmark.runs import answer, run

HEADER = {"load": "a1", "dtype": "float32"}
CELL = Cell.of(1, "lookup", group="qa", delay_ms=1.0)
OTHER = Cell.of(1, "none", in_flight=4, k=None)
RUN = run(answer(3, passes=2, proposed=4, accepted={"prompt": 1}), drafted=8)


def opened(folder: Path, resume: bool = True, **header: str) -> Journal:
    return Journal.open(folder, {**HEADER, **header}, resume)


def written(folder: Path) -> None:
    journal = opened(folder, resume=False)
    journal.add(CELL, RUN)
    journal.add(OTHER, run(answer(3)))


def test_a_resumed_journal_has_the_cells_that_were_added(tmp_path: Path) -> None:
    written(tmp_path)
    runs = opened(tmp_path).runs
    assert runs[CELL] == RUN
    assert list(runs) == [CELL, OTHER]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    journal = opened(tmp_path)
    assert list(journal.runs) == [CELL]
    journal.add(Cell.of(2, "none"), RUN)
    assert len(opened(tmp_path).runs) == 2


def test_a_run_is_not_overwritten_and_not_mixed_with_another(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(JournalError, match="continue that run with --resume"):
        opened(tmp_path, resume=False)
    with pytest.raises(JournalError, match=r"its dtype is float32, and bfloat16 in this run"):
        opened(tmp_path, dtype="bfloat16")
