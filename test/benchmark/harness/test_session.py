"""The order in which cells are served, the handling of failed cells, and the journal."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from benchmark.harness.cells import Cell, turned
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import FILE, Journal
from benchmark.harness.report import Chart, Report, Table
from benchmark.harness.run import Run
from benchmark.harness.server import Server, ServerError
from benchmark.harness.session import Session, rounded_up
from test.benchmark.runs import answer, run

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, on_gpu=False)
CELLS = [
    Cell.of(1, name, part=part)
    for part in range(3)
    for name in turned(["none", "lookup"], part + 1)
]


@dataclass
class Measured:
    """Serves nothing and records the cells that it was asked to serve."""

    served: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Names of configurations; each entry makes one attempt of that configuration fail."""

    def __call__(self, _: Server | None, cell: Cell) -> Run:
        self.served.append(f"{cell.config} {cell['part']}")
        if cell.config in self.broken:
            self.broken.remove(cell.config)
            raise ServerError("the server ended with code 1:\nValueError: no kernel")
        return run(answer())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    monkeypatch.setattr(Fleet, "run", lambda *_: None)
    return Measured()


def session(folder: Path, load: str = "prompts", **options: bool) -> Session:
    given = {"resume": False, "report_only": False, **options}
    return Session("bench", Namespace(output=folder, **given), SETTINGS, {"tokens": 8}, load)


def serve(this: Session, measured: Measured) -> None:
    this.serve(CELLS, lambda cell: Configuration(cell.config, SETTINGS), measured)


def test_every_cell_is_served_in_order_and_a_resumed_run_serves_what_is_missing(
    measured: Measured, tmp_path: Path
) -> None:
    order = ["none 0", "lookup 0", "lookup 1", "none 1", "none 2", "lookup 2"]
    whole = session(tmp_path / "whole")
    serve(whole, measured)
    assert measured.served == order
    assert list(whole.journal.runs) == CELLS
    part = session(tmp_path / "part")
    for cell in CELLS[:3]:
        part.journal.add(cell, run(answer()))
    serve(session(tmp_path / "part", report_only=True), measured)
    assert measured.served == order
    serve(session(tmp_path / "part", resume=True), measured)
    assert measured.served == order + order[3:]


def test_a_failed_cell_is_served_once_more_before_its_configuration_is_left_out(
    measured: Measured, tmp_path: Path
) -> None:
    measured.broken = ["none", "lookup", "lookup"]
    this = session(tmp_path)
    serve(this, measured)
    assert measured.served == ["none 0", "none 0", "lookup 0", "lookup 0", "none 1", "none 2"]
    assert this.failed == {"lookup": "ValueError: no kernel"}
    assert this.finish(Report("A benchmark", "", []), {}) == 1
    assert "lookup: failed: ValueError: no kernel" in (tmp_path / "report.md").read_text()


def test_a_folder_with_another_run_ends_with_one_sentence(tmp_path: Path) -> None:
    session(tmp_path)
    with pytest.raises(SystemExit, match=r"bench: error: .*--resume"):
        session(tmp_path)
    with pytest.raises(SystemExit, match=r"cannot be resumed: its load is"):
        session(tmp_path, load="other prompts", resume=True)


def test_the_last_line_is_json_and_everything_is_written(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    this = session(tmp_path)
    report = Report("A benchmark", "", [Table("Rows", ["", "speedup"], [["none", "1.00"]])])
    # Without a measured cell the command fails.
    assert this.finish(report, {"rows": []}) == 1
    serve(this, measured)
    assert this.finish(report, {"rows": []}) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "results.json").read_text())
    assert (last["rows"], last["failed"], last["tokens"]) == ([], {}, 8)
    assert last.keys() > {"command", "machine", "versions", "settings"}
    page = tmp_path / "report.html"
    assert not page.exists()
    drawn = Chart("Speedups", "A caption", "boxes", {"rows": [{"name": "none", "values": [1.0]}]})
    this.finish(replace(report, charts=(drawn,)), {})
    assert f"report: {page}\n" in capsys.readouterr().out
    assert '"values": [1.0]' in page.read_text()


def test_a_length_is_rounded_up() -> None:
    assert [rounded_up(tokens, 64) for tokens in (1, 64, 65)] == [64, 64, 128]


def test_a_line_of_the_journal_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    cell, other = Cell.of(1, "lookup", group="qa", delay=1.0), Cell.of(1, "none", k=None)
    measured = run(answer(3, passes=2, proposed=4, accepted={"prompt": 1}), drafted=8)
    journal = Journal.open(tmp_path, {}, resume=False)
    journal.add(cell, measured)
    journal.add(other, measured)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    journal = Journal.open(tmp_path, {}, resume=True)
    assert journal.runs == {cell: measured}
    journal.add(other, measured)
    assert Journal.open(tmp_path, {}, resume=True).runs == {cell: measured, other: measured}
