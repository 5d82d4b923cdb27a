"""The figures of a configuration, from answers with known figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmark.harness.run import Run
from benchmark.queueing.load import Cell
from benchmark.queueing.summary import Row, summarize
from test.benchmark.runs import answer, round_of, run


def row(one: Run, plain: Run | None = None) -> Row:
    return Row("lookup", {1: one}, {} if plain is None else {1: plain})


def test_without_speculation_every_token_takes_a_pass() -> None:
    plain = run(answer(10), answer(4), seconds=2.0)
    found = row(plain, plain)
    assert found.figures.tokens_per_s == 7.0
    assert found.figures.accept_len == 1.0
    assert found.figures.passes_per_token == 1.0
    assert found.figures.match_rate is None
    assert found.figures.wasted is None
    assert (str(found.speedup), found.identical) == ("1.00 (one round)", 1.0)


def test_acceptance_is_counted_over_all_requests() -> None:
    found = row(
        run(
            answer(10, passes=4, proposed=20, accepted={"queue": 4, "prompt": 1}),
            answer(10, passes=6, proposed=5, accepted={"queue": 3, "prompt": 0}),
            seconds=1.0,
            drafted=30,
        ),
        run(answer(10), answer(10), seconds=4.0),
    )
    assert found.figures.accept_len == pytest.approx(1 + 8 / 10)
    assert found.figures.match_rate == pytest.approx(8 / 25)
    assert found.figures.passes_per_token == pytest.approx(12 / 20)
    assert found.accepted == {"queue": 7, "prompt": 1}
    assert (found.figures.drafted, found.figures.wasted) == (30, 23)
    assert found.record()["speedup"] == pytest.approx(4.0)
    assert found.match_rates == [5 / 20, 3 / 5]


def test_tokens_accepted_past_the_end_of_an_output_do_not_count_in_the_accept_length() -> None:
    one = run(answer(9, passes=2, proposed=30, accepted={"queue": 14}))
    assert one.accept_len == pytest.approx(8 / 2)


def test_requests_with_different_output_are_counted() -> None:
    plain = run(answer(5), answer(5))
    assert row(run(answer(5), answer(5, first_id=1)), plain).identical == 0.5


def test_the_speedup_of_a_request_is_per_token_and_leaves_out_queueing_time() -> None:
    plain = run(answer(10, service=2.0, latency=100.0))
    faster = run(answer(20, service=1.0, latency=50.0))
    assert row(faster, plain).request_speedups == [pytest.approx(4.0)]


def test_several_rounds_give_medians_spreads_and_the_smallest_identical_share() -> None:
    rounds = {
        number: run(answer(6, first_id=first), seconds=float(number))
        for number, first in ((1, 0), (2, 1), (3, 0))
    }
    plain = dict.fromkeys(rounds, run(answer(6), seconds=6.0))
    found = Row("lookup", rounds, plain)
    assert str(found.speedup) == "3.00 (2.00 to 6.00)"
    assert (found.figures.tokens_per_s, found.identical) == (3.0, 0.0)


def test_a_summary_compares_within_a_round_and_lists_failures() -> None:
    names = ("none", "none-equal", "ngram", "qspec-8")
    served = ("none", "none-equal", "qspec-8")
    runs = {**round_of(1, served), **round_of(2, served)}
    summary = summarize(runs, names, {"ngram": "no kernel"})
    assert [row.config for row in summary.rows] == ["none", "none-equal", "qspec-8"]
    assert summary.blocks == 4
    record, failure = summary.records()[2:]
    assert record["speedup"] == record["by_group"]["rag"]["speedup"] == 2.0
    assert record["speedup_spread"] == record["by_group"]["rag"]["speedup_spread"] == [2.0, 2.0]
    assert record["identical_share"] == 1.0
    assert (record["drafted"], record["wasted"]) == (80, 71)
    assert record["accepted_share_by_source"] == {"queue": 0.6, "output": 0.4}
    assert failure == {"config": "ngram", "speedup": None, "error": "no kernel"}


def equal_hardware(runs: Mapping[Cell, Run], names: tuple[str, ...]) -> dict[str, Any]:
    found = summarize(runs, names, {}).equal_hardware
    return {config: ratio and ratio.median for config, ratio in found.items()}


def test_equal_hardware_gives_both_sides_all_cores() -> None:
    names = ("none", "none-equal", "lookup", "lookup-equal", "ngram", "qspec-8")
    runs = round_of(1, ("none", "none-equal", "lookup", "ngram", "qspec-8"))
    for cell, one in round_of(1, ("none",)).items():
        fast = Run(1.0, one.answers)
        runs[Cell(1, cell.group, cell.part, "lookup-equal")] = fast
    # No speculation takes 8 s, QSPEC 4 s, and lookup on all cores 2 s.
    assert equal_hardware(runs, names) == {
        "none": 1.0,
        "none-equal": 1.0,
        "lookup": 4.0,
        "lookup-equal": 4.0,
        "ngram": None,
        "qspec-8": 2.0,
    }
    assert summarize(runs, names, {}).record()["equal_hardware_speedup"] == 2.0


def test_a_block_counts_once_all_configurations_have_served_it() -> None:
    runs = {**round_of(1, ("none", "lookup")), **round_of(2, ("none",))}
    cut = {
        cell: one for cell, one in runs.items() if (cell.config, cell.group) != ("lookup", "rag")
    }
    summary = summarize(cut, ("none", "lookup"), {})
    assert summary.blocks == 1
    assert list(summary.by_group) == ["qa"]
    assert [row.figures.tokens for row in summary.rows] == [20, 20]
    assert summarize(round_of(1, ("none",)), ("none", "lookup"), {}).rows == []


def test_without_a_baseline_there_are_figures_but_no_speedup() -> None:
    summary = summarize(round_of(1, ("qspec-8",)), ("qspec-8",), {})
    record = summary.records()[0]
    assert record["speedup"] is None
    assert record["identical_share"] is None
    assert summary.record()["equal_hardware_speedup"] is None
    assert record["accept_len"] == 2.25
