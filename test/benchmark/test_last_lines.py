"""The last line of each benchmark, from made-up runs, and that its report can be written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmark.harness.cells import Cell
from benchmark.harness.report import Report
from benchmark.harness.run import Run
from benchmark.harness.summary import Summary
from benchmark.peers import summary as peers
from benchmark.peers.servers import NAMES as NAMES_OF_PEERS
from benchmark.queueing.charts import charts
from benchmark.queueing.report import report_of as queue_report
from benchmark.queueing.summary import Blocks
from benchmark.worst import summary as worst
from benchmark.worst.cases import BASELINE
from test.benchmark.runs import answer, round_of, run


def at(rate: float, first_id: int = 0) -> Run:
    """A run that makes `rate` tokens per second."""
    return run(answer(12, first_id=first_id), seconds=12 / rate)


def is_whole(report: Report) -> None:
    """The report can be printed and written, and its tables have a cell for each head."""
    assert report.text()
    assert report.markdown()
    assert all(len(line) == len(table.head) for table in report.tables for line in table.lines)


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


def test_a_queue_without_a_served_configuration_has_a_report_without_data() -> None:
    empty = charts(Blocks(round_of(1, ("none",)), ("none",)))
    assert [chart.options for chart in empty] == [None] * 4
    is_whole(queue_report(Blocks({}, ()), empty))


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


def test_peers_has_the_smallest_ratios_over_plain_over_the_best_and_over_the_fastest_peer() -> None:
    rates = {
        1: {"sglang": 100, "lookups": 120, "steps": 150, "qspec": 160, "vllm-ngram": 200},
        16: {"sglang": 400, "sglang-again": 360, "lookups": 430, "steps": 200, "qspec": 420},
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
    record = peers.record_of(summary)
    assert record["worst_over_plain"] == pytest.approx(1.05)
    assert record["worst_over_best"] == pytest.approx(0.977)
    assert record["worst_again_over_plain"] == pytest.approx(0.9)
    assert record["over_best_peer_min"] == pytest.approx(0.8)
    few, many = record["loads"]
    assert (few["in_flight"], few["over_plain"], few["over_best"]) == (1, 1.6, 1.067)
    assert (many["in_flight"], many["over_best_peer"]) == (16, None)
    rows = {(row["config"], row["in_flight"]): row for row in record["rows"]}
    assert rows["qspec", 1]["speedup"] == pytest.approx(1.6)
    assert rows["qspec", 16]["identical"] == 0.0
    report = peers.report_of(summary)
    is_whole(report)
    cell = Cell.of(1, "qspec", in_flight=1, arrival="wave", sampling="json")
    alone = Summary({cell: at(1)}, "sglang")
    assert peers.record_of(alone)["over_best_peer_min"] is None
    is_whole(peers.report_of(alone))


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
    record = peers.record_of(Summary(runs, "sglang"))
    assert record["mean_over_plain"] == {"qspec": {1: 2.0, 4: 0.5}, "lookups": {4: 1.5}}
