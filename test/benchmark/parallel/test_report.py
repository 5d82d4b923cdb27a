"""The report: complete, one file, and the right cells in each figure."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.bench_batch_parallel import record_of
from benchmark.harness import charts
from benchmark.harness.report import Figure, Report
from benchmark.parallel.comparisons import compare
from benchmark.parallel.figures import COLORS, figures, timeline
from benchmark.parallel.measures import Point, Results
from benchmark.parallel.plan import NAMES
from benchmark.parallel.report import disturbed, report_of
from benchmark.parallel.targets import targets
from sglang_qspec.tools.theory.fit import fit, predict
from sglang_qspec.tools.theory.results import read_results
from test.benchmark.parallel.cells import block_runs, one_run, streamed_run, together


@pytest.fixture
def results() -> Results:
    blocks = [block_runs(k=k, in_flight=level) for level in (2, 4) for k in (1, 4)]
    return Results(together(*blocks, streamed_run("halves"), streamed_run("none")))


def reported(
    results: Results, failed: dict[str, str] | None = None, drawn: tuple[Figure, ...] = ()
) -> Report:
    comparisons = compare(results)
    reached = targets(results, comparisons)
    facts = {"machine": "a <big> one"}
    return report_of(results.rows(), comparisons, reached, failed or {}, drawn, facts)


def record(results: Results) -> dict[str, Any]:
    return record_of(results, {})


def test_the_page_has_all_tables_and_figures(results: Results) -> None:
    pytest.importorskip("matplotlib")
    drawn = figures(results, compare(results))
    text = reported(results, {"queue": "no <memory>"}, drawn).markdown()
    assert len(drawn) == 4
    assert all((figure.svg or "").startswith("<?xml") for figure in drawn)
    assert all(f"({figure.name}.svg)" in text for figure in drawn)
    for expected in ("a <big> one", "no <memory>", "94% of 2.00", "not met"):
        assert expected in text


def test_a_figure_is_the_same_file_each_time_it_is_drawn(results: Results) -> None:
    pytest.importorskip("matplotlib")
    first, again = (figures(results, compare(results)) for _ in range(2))
    assert first == again
    assert all("<text" in (figure.svg or "") for figure in first)


def test_the_timeline_has_the_drafts_before_their_passes(results: Results) -> None:
    for name in ("sequential", "ahead", "halves"):
        row = results.row(Point(4, 4, name))
        assert row is not None
        passes, drafts = timeline(row)
        for verified, drafted in zip(passes, drafts, strict=True):
            assert verified.text == drafted.text
            assert verified.begin >= drafted.begin + drafted.length - 1e-9
        for before, after in itertools.pairwise(passes):
            assert after.begin >= before.begin + before.length - 1e-9


def test_figures_show_the_cells_they_are_about(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []

    def draw(panels: dict[str, Any], *_: object, **__: object) -> str:
        shown.append(panels)
        return ""

    monkeypatch.setattr(charts, "available", lambda: True)
    monkeypatch.setattr(charts, "lines", draw)
    monkeypatch.setattr(charts, "timeline", lambda *_: "")
    figures(results, compare(results))
    throughput, paper, same = shown
    for panels in shown:
        assert list(panels) == ["k = 1", "k = 4"]
    assert throughput["k = 1"].keys() == set(NAMES) - {"sequential-half"}
    assert throughput["k = 1"]["none"].keys() == {2, 4}
    assert paper["k = 4"]["halves"] == {2: pytest.approx(30 / 16), 4: pytest.approx(30 / 16)}
    assert same["k = 4"].keys() == {"halves", "ahead", "(V + D) / max(V, D)"}
    names = {name for panels in shown for lines in panels.values() for name in lines}
    assert names <= COLORS.keys()


def test_without_data_there_is_a_report_that_says_so() -> None:
    pytest.importorskip("matplotlib")
    results = Results({})
    drawn = figures(results, compare(results))
    assert {figure.svg for figure in drawn} == {None}
    assert "not measured" in reported(results, {}, drawn).markdown()
    assert "halves: failed: no memory" in reported(results, {"halves": "no memory"}).text()


def test_the_markdown_has_as_many_cells_in_every_line_of_a_table(results: Results) -> None:
    parts = reported(results).markdown().split("\n\n")
    tables = [part for part in parts if part.startswith("|")]
    assert len(tables) == 5
    for text in tables:
        assert len({line.count("|") for line in text.splitlines()}) == 1


def test_the_record_holds_the_compared_figures(results: Results) -> None:
    found = record(results)
    assert found["paper_ratio"] == pytest.approx(30 / 16)
    assert (found["paper_ratio_spread"], found["paper_ratio_rounds"]) == (None, 1)
    assert (found["paper_bound"], found["same_in_flight_bound"]) == (2.0, 2.0)
    assert found["same_in_flight_ratio"] == pytest.approx(1.5)
    assert found["paper_at"] == {"k": 1, "in_flight": 2}
    assert found["auto_over_best_min"] == pytest.approx(0.98)
    assert found["auto_step_over_best_min"] == pytest.approx(1.0)
    assert found["auto_speedup_2"] == found["auto_speedup_4"] > 2
    assert found["auto_speedup_8"] is None
    keys = {"pipeline", "k", "in_flight", "tokens_per_s", "hidden_share", "accept_len"}
    assert all(keys <= row.keys() for row in found["rows"])
    halves = {
        (row["k"], row["in_flight"])
        for row in found["rows"]
        if row["pipeline"] in ("halves", "sequential-half")
    }
    assert halves == {(k, n) for k in (1, 4) for n in (1, 2, 4)}


def test_the_report_names_cells_that_shared_the_machine(results: Results) -> None:
    busy = {cell: replace(run, others_share=0.4) for cell, run in one_run("ahead").items()}
    some = Results(together(one_run("halves"), busy))
    for text in (reported(some).text(), reported(some).markdown()):
        assert "Do not trust 1 of 2 cells" in text
    assert disturbed(some.rows()).endswith("processors: ahead, k = 4, 4 in flight.")
    assert disturbed(results.rows()) == ""


def test_the_theory_can_be_compared_with_the_results(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record(results)))
    rows = read_results(path)
    assert {row.pipeline for row in rows} == set(NAMES)
    assert {row.step_tokens for row in rows if row.pipeline == "ahead"} == {3, 9}
    assert predict(fit(rows), rows)


def test_a_run_with_few_measurements_still_has_a_record() -> None:
    found = record(Results(one_run("none")))
    assert found["paper_ratio"] is found["auto_over_best_min"] is found["auto_speedup_2"] is None
    assert len(found["rows"]) == 1
