"""What a run leaves on disk, and what it takes up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.journal import FILE, JournalError
from benchmark.queueing.journal import Entry, Journal
from test.benchmark.runs import answer, run

HEADER = {"load": "a1", "dtype": "float32"}
ENTRY = Entry(1, "lookup", run(answer(3, passes=2, proposed=4, accepted={"prompt": 1}))[0])


def written(folder: Path) -> None:
    journal = Journal.open(folder, HEADER, resume=False)
    journal.add(ENTRY)
    journal.add(Entry(1, "none", run(answer(3), part=1)[0]))


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal.open(tmp_path, HEADER, resume=True)
    assert journal.entries[0] == ENTRY
    assert journal.holds(1, "none", "qa", 1)
    assert not journal.holds(1, "none", "qa", 0)
    assert not journal.holds(2, "none", "qa", 1)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    journal = Journal.open(tmp_path, HEADER, resume=True)
    assert journal.entries == [ENTRY]
    journal.add(ENTRY)
    assert Journal.open(tmp_path, HEADER, resume=True).entries == [ENTRY, ENTRY]


def test_a_run_is_not_overwritten_and_not_mixed_with_another(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(JournalError, match="go on with it by --resume"):
        Journal.open(tmp_path, HEADER, resume=False)
    with pytest.raises(JournalError, match=r"its dtype is float32, and that of this run bfloat16"):
        Journal.open(tmp_path, {**HEADER, "dtype": "bfloat16"}, resume=True)
