"""The configurations and the summary of `bench_plan`."""

from __future__ import annotations

import json

import pytest

from benchmark.bench_plan import (
    cells_of,
    error_of,
    figures_of,
    predict,
    row_of,
    summary,
    table_of,
    times_of,
)
from benchmark.harness.run import Answer, Run
from sglang_qspec.tools.plan.trace import Arrival
from test.tools.plan.examples import flat


def answer(tokens: int, latency: float) -> Answer:
    return Answer(tuple(range(tokens)), latency, latency, tokens)


RUN = Run(4.0, (answer(100, 2.0), answer(60, 4.0)))
ROWS = [
    row_of("none", {"tokens_per_s": 50.0, "latency_s": 3.0}, RUN),
    row_of("auto", {"tokens_per_s": 36.0, "latency_s": 3.6}, RUN),
]


def test_the_configurations_cover_modes_slots_and_arrivals() -> None:
    cells = cells_of(1.5)
    assert len(set(cells)) == len(cells) >= 6
    assert {cell.config for cell in cells} == {"none", "queue", "ahead", "auto"}
    assert {cell["slots"] for cell in cells} == {2, 4, 8}
    assert {cell["rate"] for cell in cells} == {0.0, 1.5}


def test_the_worst_error_is_that_of_any_figure_and_configuration() -> None:
    # 99 and 59 tokens after the prefills, in 100 and 60 passes.
    figures = {"tokens_per_s": 40.0, "latency_s": 3.0, "tokens_per_pass": 0.99}
    assert ROWS[0]["measured"] == figures
    assert error_of(ROWS[0], "tokens_per_s") == pytest.approx(0.25)
    assert error_of(ROWS[1], "latency_s") == pytest.approx(0.2)
    record = summary(ROWS)
    assert record["worst_error"] == 0.25
    assert json.loads(json.dumps(record))["rows"][0]["config"] == "none"


def test_the_table_and_the_picture_show_every_configuration() -> None:
    pytest.importorskip("matplotlib")
    assert [line[0] for line in table_of(ROWS).lines] == ["none", "auto"]
    assert table_of(ROWS).lines[0][3] == "+25 %"
    (figure,) = figures_of(ROWS)
    assert figure.svg is not None
    assert "predicted" in figure.svg


def test_a_prediction_serves_the_measured_lengths() -> None:
    cell = cells_of(1.0)[0]
    found = predict(flat(verify=0.05), cell, [Arrival(0.0, 5, 21)] * 4)
    assert found == pytest.approx(
        {"tokens_per_s": 84.0, "latency_s": 1.0, "tokens_per_pass": 1.0, "pass_ms": 50.0}
    )


def test_arrivals_repeat_from_run_to_run() -> None:
    at_once, later = cells_of(2.0)[0], cells_of(2.0)[-1]
    assert times_of(at_once, 3) == [0.0] * 3
    assert times_of(later, 5) == times_of(later, 5) == sorted(times_of(later, 5))
