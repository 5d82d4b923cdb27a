"""Rows, ratios with their spread, and other figures, from answers with known figures."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from benchmark.harness.cells import Cell, Value
from benchmark.harness.run import Run
from benchmark.harness.statistics import Medians, Ratio, percentile, ratio_record, rounded
from benchmark.harness.summary import FIGURES, Row, Summary
from test.benchmark.runs import answer, counters_of, run


def at(tokens_per_s: float) -> Run:
    return run(answer(10), seconds=10 / tokens_per_s)


def runs_at(config: str, *tokens_per_s: float, **load: Value) -> dict[Cell, Run]:
    """A run of ten tokens in each round, at the given rates."""
    return {
        Cell.of(number, config, **load): at(rate) for number, rate in enumerate(tokens_per_s, 1)
    }


def row(one: Run, plain: Run | None = None) -> Row:
    return Row("lookup", {}, {1: one}, {} if plain is None else {1: plain})


def test_a_cell_names_its_dimensions_and_survives_json() -> None:
    cell = Cell.of(2, "qspec", in_flight=8, case="long", delay=1.0)
    assert str(cell) == "round 2, in flight 8, case long, delay 1.0, qspec"
    assert (cell["in_flight"], cell["case"], cell["k"]) == (8, "long", None)
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell


def test_a_row_has_its_load_its_speedup_and_all_figures() -> None:
    runs = runs_at("none", 100, 50, 100, n=8) | runs_at("qspec", 101, 49, 120, n=8)
    plain, qspec = Summary(runs, "none").rows
    assert plain.speedup is None
    record = qspec.record()
    assert (record["n"], record["config"], record["rounds"]) == (8, "qspec", 3)
    assert (record["speedup"], record["speedup_spread"]) == (1.01, [0.98, 1.2])
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


def test_a_ratio_uses_the_rounds_that_both_sides_served_and_shows_its_spread() -> None:
    # In the second round the machine ran at half its speed.
    ours = {1: at(101.0), 2: at(49.0), 3: at(120.0), 4: at(1.0)}
    plain = {1: at(100.0), 2: at(50.0), 3: at(100.0), 5: at(1.0)}
    ratio = Ratio.of(ours, plain)
    assert ratio is not None
    assert ratio.values == pytest.approx((1.01, 0.98, 1.2))
    assert str(ratio) == "1.01 (0.98 to 1.20)"
    assert ratio_record("speedup", ratio) == {
        "speedup": 1.01,
        "speedup_spread": [0.98, 1.2],
        "speedup_rounds": 3,
    }


def test_a_ratio_of_one_round_says_that_it_has_no_spread() -> None:
    ratio = Ratio((0.85,))
    assert str(ratio) == "0.85 (one round)"
    assert ratio_record("worst", ratio)["worst_spread"] is None
    assert Ratio.of({1: at(1.0)}, {2: at(1.0)}) is None
    assert ratio_record("worst", None)["worst"] is None


def test_a_median_uses_the_runs_that_have_the_figure() -> None:
    found = Medians((run(answer(4), drafted=7), run(answer(6)), run(answer(8), drafted=9)))
    assert (found.tokens, found.drafted, found.match_rate) == (6, 8, None)
    # A percentile is a value that occurred.
    assert percentile([float(value) for value in range(200, 0, -1)], 0.99) == 198.0
    assert rounded({"a": [1.23456, 2], "b": None}) == {"a": [1.235, 2], "b": None}
