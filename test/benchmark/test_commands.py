"""Each benchmark with a session as its command: cells, journal, resuming and the last line.

Servers, models and datasets are stand-ins, so only the figures are made up.
"""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.harness.fleet import Fleet
from benchmark.harness.run import Run
from test.benchmark.runs import answer, counters_of, run

PROMPTS = [f"prompt {number}" for number in range(40)]
COMMANDS: dict[str, tuple[list[str], int, set[str]]] = {
    "bench_queue": (
        ["--configs", "none", "none-equal", "qspec-8", "--num-prompts", "8", "--block", "4"],
        3 * 2,
        {"equal_hardware_speedup"},
    ),
    "bench_worst_case": (
        ["--levels", "1", "8", "--widths", "4", "--rounds", "1"],
        2 * (4 * 2 + 4),
        {"worst_ratio", "adaptive_over_best_fixed_min"},
    ),
    "bench_peers": (
        ["--levels", "1", "4", "--rounds", "1", "--matrix", "--idle", "0"],
        2 * 3 * 3 * 5,
        {"worst_over_plain", "worst_again_over_plain", "worst_over_best", "loads"},
    ),
    "bench_peers --pipelines": (
        ["--levels", "1", "2", "--rounds", "1", "--pipelines", "--k", "2", "4"],
        (2 + 4 * 2) + (2 + 5 * 2),
        {"auto_over_best_min"},
    ),
}
"""By benchmark: options, number of cells, and keys of the last line besides `rows`."""
DRAWN = {"bench_queue": 0, "bench_worst_case": 1, "bench_peers": 1, "bench_peers --pipelines": 0}
"""Number of SVG files; a figure without data has none."""


def measured(*_: object, **__: object) -> Run:
    one = run(answer(10, passes=4, proposed=8, accepted={"step": 4}), seconds=0.5)
    return Run(one.seconds, one.answers, counters=counters_of())


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "run", lambda *_: SimpleNamespace(explain=lambda error: error))
    texts = ({"qa": PROMPTS}, {"qa": 0})
    for name in ("bench_queue", "bench_worst_case", "bench_peers"):
        monkeypatch.setattr(f"benchmark.{name}.fitting", lambda *_: texts)
    for name in ("bench_queue", "bench_peers"):
        monkeypatch.setattr(f"benchmark.{name}.serve", measured)
    monkeypatch.setattr("benchmark.bench_peers.update_settings", lambda *_: None)
    monkeypatch.setattr("benchmark.bench_peers.token_ids", lambda *_: [[n] for n in range(200)])
    worst = "benchmark.bench_worst_case"
    monkeypatch.setattr(f"{worst}.vocab_size_of", lambda _: 100)
    monkeypatch.setattr(f"{worst}.Loads", lambda *_: SimpleNamespace(of=lambda *_: None))
    monkeypatch.setattr(f"{worst}.Client.serve", measured)
    monkeypatch.setattr(f"{worst}.wrong_sidecar.running", lambda *_: nullcontext("ipc:///wrong"))


def last_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    given = ["--dataset", "d.jsonl", "--cpu", "--model", "t", "--draft-model", "d"]
    arguments = [*given, *COMMANDS[name][0], "--output", str(folder), *more]
    status = importlib.import_module(f"benchmark.{name.split()[0]}").main(arguments)
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, record


@pytest.mark.parametrize("name", COMMANDS)
def test_the_last_line_has_the_rows_the_comparisons_and_the_conditions(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run measures what is missing, and a report alone measures nothing."""
    _, cells, keys = COMMANDS[name]
    # Only the report draws: a chart takes a second.
    with monkeypatch.context() as undrawn:
        undrawn.setattr("benchmark.harness.charts.available", lambda: False)
        status, record = last_line(name, tmp_path, capsys)
        assert (status, record["failed"]) == (0, {})
        shared = {"rows", "command", "machine", "versions", "settings"}
        assert record.keys() >= keys | shared
        assert {row["tokens_per_s"] for row in record["rows"]} == {20.0}
        assert {row["speedup"] for row in record["rows"]} <= {1.0, None}
        journal = tmp_path / "runs.jsonl"
        whole = journal.read_text()
        assert len(whole.splitlines()) == 1 + cells
        journal.write_text("".join(whole.splitlines(keepends=True)[:-2]))
        status, resumed = last_line(name, tmp_path, capsys, "--resume")
        assert (status, resumed["rows"]) == (0, record["rows"])
        assert sorted(journal.read_text().splitlines()) == sorted(whole.splitlines())
    status, again = last_line(name, tmp_path, capsys, "--report-only")
    assert (status, again["rows"]) == (0, record["rows"])
    assert len(list(tmp_path.glob("*.svg"))) == DRAWN[name]
    assert journal.read_text().count("\n") == 1 + cells


def test_a_resumed_run_may_have_other_k_but_no_other_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "bench_peers --pipelines"
    last_line(name, tmp_path, capsys)
    status, record = last_line(name, tmp_path, capsys, "--k", "8", "--rounds", "2", "--resume")
    assert status == 0
    assert {row["k"] for row in record["rows"]} == {None, 2, 4, 8}
    with pytest.raises(SystemExit, match="its max_new_tokens is 128, and 127 in this run"):
        last_line(name, tmp_path, capsys, "--max-new-tokens", "127", "--resume")
