"""Rows, and ratios between configurations, from answers with known figures."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from benchmark.harness.cells import Cell, Value
from benchmark.harness.run import Run
from benchmark.harness.summary import FIGURES, Row, Summary
from test.benchmark.runs import answer, counters_of, run


def runs_at(config: str, *tokens_per_s: float, **load: Value) -> dict[Cell, Run]:
    """A run of ten tokens in each round, at the given rates."""
    return {
        Cell.of(number, config, **load): run(answer(10), seconds=10 / rate)
        for number, rate in enumerate(tokens_per_s, 1)
    }


def row(one: Run, plain: Run | None = None) -> Row:
    return Row("lookup", {}, {1: one}, {} if plain is None else {1: plain})


def test_a_cell_names_its_dimensions_and_survives_json() -> None:
    cell = Cell.of(2, "qspec", in_flight=8, case="long", delay=1.0)
    assert str(cell) == "round 2, in flight 8, case long, delay 1.0, qspec"
    assert (cell["in_flight"], cell["case"], cell["k"]) == (8, "long", None)
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell


def test_a_speedup_is_within_each_round_and_has_a_spread() -> None:
    # In the second round the machine ran at half its speed.
    runs = runs_at("none", 100, 50, 100, n=8) | runs_at("qspec", 101, 49, 120, n=8)
    plain, qspec = Summary(runs, "none").rows
    assert plain.speedup is None
    assert str(qspec.speedup) == "1.01 (0.98 to 1.20)"
    record = qspec.record()
    assert (record["n"], record["config"], record["rounds"]) == (8, "qspec", 3)
    assert record["speedup_spread"] == [0.98, 1.2]
    assert record.keys() > set(FIGURES)
    assert json.loads(json.dumps(record)) == record


def test_rows_are_sorted_by_load_and_configuration() -> None:
    runs = runs_at("b", 1, n=16) | runs_at("a", 1, n=2) | runs_at("b", 1, n=2)
    assert [(r.load["n"], r.config) for r in Summary(runs, "none", ("a", "b")).rows] == [
        *((2, "a"), (2, "b"), (16, "b")),
    ]
    texts = runs_at("a", 1, case="z", n=8) | runs_at("a", 1, case="b", n=1)
    summary = Summary(texts, "none")
    assert [r.load["case"] for r in summary.rows] == ["z", "b"]
    assert (summary.values("n"), summary.configs) == ([8, 1], ["a"])


def test_a_baseline_may_depend_on_fewer_dimensions() -> None:
    runs = runs_at("none", 10, n=2) | runs_at("none", 40, n=4) | runs_at("qspec", 20, n=2, k=4)
    (row,) = (row for row in Summary(runs, "none").rows if row.config == "qspec")
    assert str(row.speedup) == "2.00 (one round)"


def test_a_ratio_needs_a_round_with_both_sides() -> None:
    runs = runs_at("a", 30, n=1) | {Cell.of(2, "b", n=1): run(answer(10))}
    summary = Summary(runs | runs_at("c", 10, n=2), "none")
    assert summary.ratio("a", "b", {"n": 1}) is None
    assert summary.ratio("a", "missing", {"n": 1}) is None
    assert str(summary.ratio("a", "c", {"n": 1}, {"n": 2})) == "3.00 (one round)"


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
    assert found.figures.proposed_per_pass == pytest.approx(2.5)
    assert found.figures.accepted_per_pass == pytest.approx(0.8)
    assert found.accepted == {"queue": 7, "prompt": 1}
    assert (found.figures.drafted, found.figures.wasted) == (30, 23)
    assert found.record()["speedup"] == pytest.approx(4.0)
    assert found.record()["accepted_share_by_source"] == {"queue": 0.875, "prompt": 0.125}


def test_without_speculation_every_token_takes_a_pass() -> None:
    found = row(run(answer(10), answer(4), seconds=2.0))
    assert (found.speedup, found.identical) == (None, None)
    figures = found.figures
    assert (figures.tokens_per_s, figures.proposed_per_pass) == (7.0, 0.0)
    assert figures.accept_len == figures.passes_per_token == 1.0
    for name in ("match_rate", "wasted", "verify_s", "hidden_share"):
        assert getattr(figures, name) is None


def test_requests_with_different_output_are_counted_and_the_worst_round_counts() -> None:
    plain = run(answer(5), answer(5))
    other = run(answer(5), answer(5, first_id=1))
    assert row(other, plain).identical == 0.5
    assert Row("a", {}, {1: plain, 2: other}, {1: plain, 2: plain}).identical == 0.5
    assert row(other).identical is None


def test_times_are_for_each_verify_pass() -> None:
    counters = counters_of(verify_s=0.03, draft_s=0.02, waited_s=0.005)
    found = replace(run(answer()), counters=counters)
    assert found.verify_s == pytest.approx(0.03)
    assert found.draft_s == pytest.approx(0.02)
    assert found.waited_s == pytest.approx(0.005)
    assert found.hidden_share == pytest.approx(0.75)
    assert (found.batch, found.width) == (3, 5)
    # A wait that is longer than the drafting hides nothing; without drafting there is no share.
    waits = counters_of(draft_s=0.01, waited_s=0.02)
    assert replace(found, counters=waits).hidden_share == 0
    assert replace(found, counters=counters_of(draft_s=0.0)).hidden_share is None
