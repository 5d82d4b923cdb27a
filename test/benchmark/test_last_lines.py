"""The last line of each benchmark, from made-up runs, and that its report can be written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark import bench_batch_parallel, bench_peers
from benchmark.harness.cells import Cell
from benchmark.harness.report import Report
from benchmark.harness.run import Run
from benchmark.harness.summary import Row, Summary
from benchmark.parallel.comparisons import compare
from benchmark.parallel.figures import figures
from benchmark.parallel.measures import Results
from benchmark.parallel.plan import NAMES
from benchmark.parallel.report import disturbed
from benchmark.parallel.report import report_of as parallel_report
from benchmark.peers.servers import NAMES as NAMES_OF_PEERS
from benchmark.queueing import configurations
from benchmark.queueing.charts import charts, match_rates, request_speedups
from benchmark.queueing.report import report_of as queue_report
from benchmark.queueing.summary import Blocks
from benchmark.worst import summary as worst
from benchmark.worst.cases import ADAPTIVE, BASELINE
from sglang_qspec.tools.theory.fit import fit, predict
from sglang_qspec.tools.theory.results import read_results
from test.benchmark.parallel.cells import block_runs, one_run, streamed_run, together
from test.benchmark.runs import answer, round_of, run


def at(rate: float, first_id: int = 0) -> Run:
    """A run that makes `rate` tokens per second."""
    return run(answer(12, first_id=first_id), seconds=12 / rate)


def is_whole(report: Report) -> None:
    """Each table can be printed, and has as many cells in each line as heads."""
    assert report.text()
    for text in report.markdown().split("\n\n"):
        if text.startswith("|"):
            assert len({line.count("|") for line in text.splitlines()}) == 1


def test_queue_compares_with_no_speculation_also_at_equal_hardware() -> None:
    names = ("none", "none-equal", "lookup", "lookup-equal", "qspec-8")
    runs = {**round_of(1, names), **round_of(2, names)}
    for cell, one in runs.items():
        if cell.config == "lookup-equal":
            runs[cell] = replace(one, seconds=one.seconds / 2)
    blocks = Blocks(runs, names)
    assert blocks.count == 4
    record = json.loads(json.dumps(blocks.record()))
    rows = {row["config"]: row for row in record["rows"]}
    assert list(rows) == list(names)
    assert record["equal_hardware_speedup"] == 2.0
    qspec = rows["qspec-8"]
    assert qspec["speedup"] == qspec["by_group"]["rag"]["speedup"] == 2.0
    assert qspec["by_group"]["qa"]["accept_len"] == 2.25
    assert (qspec["identical"], qspec["drafted"], qspec["wasted"]) == (1.0, 80, 71)
    # Without a sidecar a configuration has all cores in the comparison at equal hardware.
    equal = {name: row["equal_hardware_speedup"] for name, row in rows.items()}
    assert equal["lookup"] == equal["lookup-equal"] == 4.0
    assert (equal["none"], equal["qspec-8"]) == (1.0, 2.0)
    is_whole(queue_report(blocks, charts(blocks)))


def test_queue_counts_a_block_once_all_configurations_have_served_it() -> None:
    runs = {**round_of(1, ("none", "lookup")), **round_of(2, ("none",))}
    cut = {
        cell: one for cell, one in runs.items() if (cell.config, cell["group"]) != ("lookup", "rag")
    }
    blocks = Blocks(cut, ("none", "lookup"))
    assert (blocks.count, blocks.groups) == (1, ["qa"])
    assert [row.figures.tokens for row in blocks.every.rows] == [20, 20]
    assert Blocks(round_of(1, ("none",)), ("none", "lookup")).every.rows == []


def test_queue_draws_four_charts_of_its_own_configurations() -> None:
    served = [name for name in configurations.NAMES if name != "ngram"]
    match_rates, speedups, completions, against = (
        dict(chart.options or {}) for chart in charts(Blocks(round_of(1, served), served))
    )
    for chart in (match_rates, speedups):
        assert [row["name"] for row in chart["rows"]][-1] == "qspec-8"
        assert "none" not in [row["name"] for row in chart["rows"]]
    assert completions["series"][0]["points"] == [(n, 2.0) for n in (1, 2, 4, 8)]
    assert [row["values"] for row in against["rows"]] == [[2.0, 2.0]] * 3
    empty = Blocks(round_of(1, ("none",)), ("none",))
    assert [chart.options for chart in charts(empty)] == [None] * 4
    is_whole(queue_report(Blocks({}, ()), charts(empty)))


def test_the_speedup_of_a_request_is_per_token_and_leaves_out_queueing_time() -> None:
    plain = run(answer(10, service=2.0, latency=100.0))
    sources = {"queue": 4, "prompt": 1}
    faster = run(answer(20, service=1.0, latency=50.0, proposed=20, accepted=sources))
    row = Row("lookup", {}, {1: faster}, {1: plain})
    assert request_speedups(row) == [pytest.approx(4.0)]
    assert match_rates(row) == [5 / 20]


def worst_runs(case: str, in_flight: int, **rates: list[float]) -> dict[Cell, Run]:
    return {
        Cell.of(number, config.replace("_", "-"), case=case, in_flight=in_flight): at(rate)
        for config, found in rates.items()
        for number, rate in enumerate(found, 1)
    }


def test_worst_case_has_the_smallest_ratios() -> None:
    runs = worst_runs("random-text", 1, none=[100], adaptive=[98])
    runs |= worst_runs("random-text", 8, none=[100], adaptive=[150])
    widths = {"width_2": [100.0, 100.0], "width_8": [200.0, 210.0]}
    runs |= worst_runs("spec-bench", 1, adaptive=[210.0, 210.0], **widths)
    summary = Summary(runs, BASELINE)
    record = json.loads(json.dumps(worst.record_of(summary)))
    assert (record["worst_ratio"], record["worst_ratio_spread"]) == (0.98, None)
    assert record["adaptive_over_best_fixed_min_spread"] == [1.0, 1.05]
    assert len(record["rows"]) == 7
    is_whole(worst.report_of(summary))
    none = worst.record_of(Summary({}, BASELINE))
    assert (none["worst_ratio"], none["adaptive_over_best_fixed_min"]) == (None, None)


def test_worst_case_draws_the_adaptive_width_alone() -> None:
    pytest.importorskip("matplotlib")
    rates = {BASELINE: [100.0], ADAPTIVE: [150.0], "width_4": [140.0]}
    runs = worst_runs("spec-bench", 1, **rates) | worst_runs("random-text", 1, **rates)
    (figure,) = worst.report_of(Summary(runs, BASELINE)).figures
    assert "Spec-Bench" in (figure.svg or "")
    assert "width-4" not in (figure.svg or "")


def test_peers_has_the_smallest_ratios_over_plain_over_the_best_and_over_the_fastest_peer() -> None:
    rates = {
        1: {"sglang": 100, "lookups": 120, "steps": 150, "qspec": 160, "vllm-ngram": 200},
        16: {"sglang": 400, "lookups": 430, "steps": 200, "qspec": 420},
    }
    runs = {
        Cell.of(number, name, in_flight=level, arrival="steady", sampling="greedy"): at(
            rate, first_id=level * (name == "qspec")
        )
        for number in (1, 2)
        for level, found in rates.items()
        for name, rate in found.items()
    }
    summary = Summary(runs, "sglang", NAMES_OF_PEERS)
    record = bench_peers.record_of(summary)
    assert record["worst_over_plain"] == pytest.approx(1.05)
    assert record["worst_over_best"] == pytest.approx(0.977)
    assert record["over_best_peer_min"] == pytest.approx(0.8)
    few, many = record["loads"]
    assert (few["in_flight"], few["over_plain"], few["over_best"]) == (1, 1.6, 1.067)
    assert (many["in_flight"], many["over_best_peer"]) == (16, None)
    rows = {(row["config"], row["in_flight"]): row for row in record["rows"]}
    assert rows["qspec", 1]["speedup"] == pytest.approx(1.6)
    assert rows["qspec", 16]["identical"] == 0.0
    report = bench_peers.report_of(summary)
    is_whole(report)
    assert "1.05 (1.05 to 1.05); over the fastest peer, at least: 0.80" in report.headline
    cell = Cell.of(1, "qspec", in_flight=1, arrival="wave", sampling="json")
    alone = Summary({cell: at(1)}, "sglang")
    assert bench_peers.record_of(alone)["over_best_peer_min"] is None
    assert "–" in bench_peers.report_of(alone).text()


def test_peers_has_the_geometric_means_over_all_loads_by_requests_in_flight() -> None:
    runs = {
        Cell.of(1, name, in_flight=level, arrival=arrival, sampling="greedy"): at(rate)
        for level, arrival, rates in (
            (1, "wave", {"sglang": 100, "qspec": 400}),
            (1, "queue", {"sglang": 100, "qspec": 100}),
            (4, "wave", {"sglang": 100, "qspec": 50, "lookups": 150}),
        )
        for name, rate in rates.items()
    }
    record = bench_peers.record_of(Summary(runs, "sglang"))
    assert record["mean_over_plain"] == {"qspec": {1: 2.0, 4: 0.5}, "lookups": {4: 1.5}}


@pytest.fixture
def results() -> Results:
    blocks = [block_runs(k=k, in_flight=level) for level in (2, 4) for k in (1, 4)]
    return Results(together(*blocks, streamed_run("halves"), streamed_run("none")))


def parallel_record(results: Results) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(bench_batch_parallel.record_of(results)))
    return found


def test_batch_parallel_holds_the_compared_figures(results: Results) -> None:
    found = parallel_record(results)
    assert found["paper_ratio"] == pytest.approx(30 / 16)
    assert (found["paper_ratio_spread"], found["paper_ratio_rounds"]) == (None, 1)
    assert (found["paper_bound"], found["same_in_flight_bound"]) == (2.0, 2.0)
    assert found["same_in_flight_ratio"] == pytest.approx(1.5)
    assert found["paper_at"] == {"k": 1, "in_flight": 2}
    assert found["auto_over_best_min"] == pytest.approx(0.98)
    assert found["auto_step_over_best_min"] == pytest.approx(1.0)
    assert found["auto_speedup_2"] == found["auto_speedup_4"] > 2
    assert found["auto_speedup_8"] is None
    rows = {(row["pipeline"], row["k"], row["in_flight"]): row for row in found["rows"]}
    assert {(k, n) for name, k, n in rows if name == "sequential-half"} == {
        *((1, 1), (1, 2), (4, 1), (4, 2)),
    }
    halves = rows["halves", 4, 4]
    assert halves["speedup"] > halves["equal_hardware_speedup"] > 1
    assert (halves["itl_mean"], halves["used"]) == (0.02, {"halves": 1.0})
    assert rows["sequential-half", 4, 2]["speedup"] is None
    assert rows["none", None, 4]["itl_p99"] == 0.06
    few = parallel_record(Results(one_run("none")))
    assert few["paper_ratio"] is few["auto_over_best_min"] is few["auto_speedup_2"] is None
    assert len(few["rows"]) == 1


def test_the_theory_reads_the_rows_of_batch_parallel(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(parallel_record(results)))
    rows = read_results(path)
    assert {row.pipeline for row in rows} == set(NAMES)
    assert {row.step_tokens for row in rows if row.pipeline == "ahead"} == {3, 9}
    assert predict(fit(rows), rows)


def test_batch_parallel_draws_four_figures_that_are_the_same_each_time(results: Results) -> None:
    pytest.importorskip("matplotlib")
    first, again = (figures(results, compare(results)) for _ in range(2))
    assert first == again
    assert len(first) == 4
    assert all("<text" in (figure.svg or "") for figure in first)
    is_whole(parallel_report(results, compare(results), first))
    empty = Results({})
    assert {figure.svg for figure in figures(empty, compare(empty))} == {None}
    is_whole(parallel_report(empty, compare(empty)))


def test_batch_parallel_names_cells_that_shared_the_machine(results: Results) -> None:
    busy = {cell: replace(one, others_share=0.4) for cell, one in one_run("ahead").items()}
    some = Results(together(one_run("halves"), busy))
    assert "Do not trust 1 of 2 cells" in parallel_report(some, compare(some)).text()
    assert disturbed(some.rows).endswith("processors: ahead, k = 4, 4 in flight.")
    assert disturbed(results.rows) == ""
