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
    "bench_batch_parallel": (
        ["--k", "2", "4", "--in-flight", "1", "2", "--rounds", "1"],
        (5 + 7) * 2 + 2 * 2 + 6 + 7,
        {"paper_ratio", "same_in_flight_ratio", "auto_over_best_min", "auto_speedup_2"},
    ),
    "bench_worst_case": (
        ["--levels", "1", "8", "--widths", "4", "--rounds", "1"],
        2 * (4 * 2 + 4),
        {"worst_ratio", "adaptive_over_best_fixed_min"},
    ),
    "bench_peers": (
        ["--levels", "1", "4", "--rounds", "1", "--matrix", "--idle", "0"],
        2 * 3 * 3 * 4,
        {"worst_over_plain", "worst_over_best", "over_best_peer_min", "loads"},
    ),
}
"""By benchmark: options, number of cells, and keys of the last line besides `rows`."""


def measured(*_: object, **__: object) -> Run:
    one = run(answer(10, passes=4, proposed=8, accepted={"step": 4}), seconds=0.5)
    return Run(one.seconds, one.answers, counters=counters_of())


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "run", lambda *_: SimpleNamespace(explain=lambda error: error))
    texts = ({"qa": PROMPTS}, {"qa": 0})
    for name in COMMANDS:
        monkeypatch.setattr(f"benchmark.{name}.fitting", lambda *_: texts)
    monkeypatch.setattr("benchmark.bench_queue.serve", measured)
    monkeypatch.setattr("benchmark.bench_batch_parallel.measure", measured)
    for name in ("update_settings", "await_drafts"):
        monkeypatch.setattr(f"benchmark.bench_peers.{name}", lambda *_: None)
    monkeypatch.setattr("benchmark.bench_peers.keep_in_flight", measured)
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
    status = importlib.import_module(f"benchmark.{name}").main(arguments)
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return status, record


@pytest.mark.parametrize("name", COMMANDS)
def test_the_last_line_has_the_rows_the_comparisons_and_the_conditions(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, cells, keys = COMMANDS[name]
    status, record = last_line(name, tmp_path, capsys)
    assert (status, record["failed"]) == (0, {})
    shared = {"rows", "command", "machine", "versions", "settings"}
    assert record.keys() >= keys | shared
    assert {row["tokens_per_s"] for row in record["rows"]} == {20.0}
    assert {row["speedup"] for row in record["rows"]} <= {1.0, None}
    journal = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(journal) == 1 + cells
    status, again = last_line(name, tmp_path, capsys, "--report-only")
    assert (status, again["rows"]) == (0, record["rows"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_resumed_run_measures_what_is_missing(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, first = last_line(name, tmp_path, capsys)
    journal = tmp_path / "runs.jsonl"
    whole = journal.read_text()
    journal.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    status, record = last_line(name, tmp_path, capsys, "--resume")
    assert (status, record["rows"]) == (0, first["rows"])
    assert sorted(journal.read_text().splitlines()) == sorted(whole.splitlines())
