"""The pipelines of `bench_peers`: their cells, their settings, and how they are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.bench_peers import parse
from benchmark.harness.cells import Cell
from benchmark.harness.run import Run
from benchmark.harness.summary import Summary
from benchmark.peers.loads import cells_of, prompts_of
from benchmark.peers.pipelines import PIPELINES
from benchmark.peers.servers import NAMES, ask
from benchmark.peers.summary import record_of, report_of
from sglang_qspec.config import MODES
from sglang_qspec.tools.theory.fit import fit, predict
from sglang_qspec.tools.theory.results import read_results
from test.benchmark.runs import answer, counters_of, run

GIVEN = ("--dataset", "d", "--pipelines", "--rounds", "2")
RATES = {"none": 10.0, "sglang": 15.0, "auto": 28.0, "queue": 20.0, "ahead": 25.0}
RATES |= {"sequential": 20.0, "halves": 30.0}
"""Decoded tokens per second."""


def test_pipelines_of_one_k_are_neighbours_and_rounds_reverse() -> None:
    options = parse([*GIVEN, "--levels", "1", "2", "--k", "8", "4", "8"])
    cells = cells_of(options)
    half = len(cells) // 2
    assert [replace(cell, round=1) for cell in cells[half:]] == cells[:half][::-1]
    two = [(cell["k"], cell.config) for cell in cells if (cell.round, cell["in_flight"]) == (1, 2)]
    assert two == [
        *((None, "none"), (None, "sglang")),
        *((k, name) for k in (4, 8) for name in PIPELINES),
    ]
    one = {cell.config for cell in cells if cell["in_flight"] == 1}
    assert one == {cell.config for cell in cells} - {"halves"}
    prompts = [[number] for number in range(300)]
    served = {cell["k"]: prompts_of(cell, prompts, options) for cell in cells if cell.round == 2}
    assert served[None] == served[4] == served[8]
    assert served[4] != prompts_of(cells[0], prompts, options)


def test_each_pipeline_has_the_servers_mode_and_its_own_width_and_draft_sources() -> None:
    for name, pipeline in PIPELINES.items():
        assert MODES[pipeline.mode] == name
    assert PIPELINES["sequential"].runtime(4) == {
        "qspec_mode": 1,
        "qspec_draft_token_num": 5,
        "qspec_step_tokens": 16,
        "qspec_fixed_width": 1,
    }
    assert PIPELINES["ahead"].runtime(4)["qspec_step_tokens"] == 9
    assert PIPELINES["sequential"].runtime(24)["qspec_step_tokens"] == 24
    bodies: list[dict[str, Any]] = []

    def post(_path: str, body: dict[str, Any], _timeout: float) -> Any:
        bodies.append(body["sampling_params"])
        return {"output_ids": [1], "meta_info": {}}

    server: Any = SimpleNamespace(post=post)
    for name in ("halves", "queue", "auto"):
        ask(name, server, [1, 2], 5)
    asked = [body.get("custom_params") for body in bodies]
    assert asked == [{"qspec_sources": ["step"]}, {"qspec_sources": ["queue"]}, None]
    assert all((body["max_new_tokens"], body["ignore_eos"]) == (5, True) for body in bodies)


def served(level: int, k: int) -> dict[Cell, Run]:
    """A round of all configurations, with V = 30 ms, D = 20 ms and a prefill of half a second."""
    found = {}
    for name, rate in RATES.items():
        load: dict[str, Any] = {"in_flight": level, "arrival": "queue", "sampling": "greedy"}
        load |= {"k": k} if name in PIPELINES else {}
        one = run(*[answer(11, passes=5)] * 6, seconds=60 / rate + 0.5)
        counted = counters_of("halves" if name == "auto" else name) if name in PIPELINES else None
        found[Cell.of(1, name, **load)] = replace(one, prefill_seconds=0.5, counters=counted)
    return found


@pytest.fixture
def summary() -> Summary:
    runs = [served(level, k) for level in (2, 4) for k in (1, 4)]
    return Summary({cell: one for some in runs for cell, one in some.items()}, "sglang", NAMES)


def test_the_rows_of_pipelines_have_their_ratios_and_the_bound(summary: Summary) -> None:
    record = json.loads(json.dumps(record_of(summary)))
    assert record["auto_over_best_min"] == pytest.approx(28 / 30, abs=1e-3)
    rows = {(row["config"], row["k"], row["in_flight"]): row for row in record["rows"]}
    halves = rows["halves", 4, 4]
    assert halves["over_sequential"] == 1.5
    assert halves["bound"] == pytest.approx(50 / 30, abs=1e-3)
    # With the time of the prefill.
    assert halves["over_none"] == pytest.approx(6.5 / 2.5)
    assert halves["speedup"] == pytest.approx(4.5 / 2.5)
    assert (halves["step_tokens"], rows["ahead", 4, 2]["step_tokens"]) == (16, 9)
    assert rows["auto", 1, 2]["used"] == {"halves": 1.0}
    assert record["mean_over_plain"].keys() == {"none"}
    table = report_of(summary).tables[-1]
    assert len(table.lines) == 4 * len(PIPELINES)
    assert {len(line) for line in table.lines} == {len(table.head)}


def test_the_theory_reads_the_rows(summary: Summary, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record_of(summary)))
    rows = read_results(path)
    assert {row.pipeline for row in rows} == set(RATES)
    assert {row.step_tokens for row in rows if row.pipeline == "ahead"} == {3, 9}
    known = {one.result.pipeline for one in predict(fit(rows), rows)}
    assert known == set(RATES) - {"sglang"}
