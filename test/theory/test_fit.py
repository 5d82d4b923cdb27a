"""The model fitted to measured rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from sglang_qspec.errors import TheoryError
from sglang_qspec.theory import (
    Comparison,
    Curve,
    Row,
    compare,
    estimates,
    expected_tokens,
    fit,
    read_rows,
)

ALPHA = {3: 0.95, 7: 0.92}
OVERHEAD = 0.004


def verify(b: int, width: int) -> float:
    return 0.03 + 0.001 * max(0, b * width - 8)


def draft(b: int, k: int) -> float:
    return k * (0.002 + 0.0003 * b)


def made(pipelines: tuple[str, ...] = ("none", "sequential", "halves", "ahead")) -> list[Row]:
    """Rows of a machine on which the model is exact."""
    rows = []
    for k, alpha in ALPHA.items():
        for b in (1, 2, 4, 8):
            found = estimates(
                alpha,
                k,
                b,
                verify,
                partial(draft, k=k),
                overhead=OVERHEAD,
            )
            rows += [
                Row(
                    name,
                    k,
                    b,
                    found[name].rate,
                    found[name].tokens,
                    None if name == "none" else verify(b, k + 1),
                    None if name == "none" else draft(b, k),
                )
                for name in pipelines
            ]
    return rows


def test_a_fit_recovers_the_parameters_of_generated_rows() -> None:
    model = fit(made())
    for k, alpha in ALPHA.items():
        assert model.alpha(k) == pytest.approx(alpha)
        assert model.verify_seconds(4, k + 1) == pytest.approx(verify(4, k + 1))
        assert model.draft_seconds(3, k) == pytest.approx(draft(3, k))
    assert model.verify_seconds(8, 1) == pytest.approx(verify(8, 1))
    assert model.overhead(4) == pytest.approx(OVERHEAD)


def test_rows_that_were_not_fitted_are_predicted() -> None:
    rows = made()
    compared = compare(fit(rows), rows)
    assert len(compared) == len(rows)
    assert max(abs(each.error) for each in compared) < 1e-6
    assert {each.row.pipeline for each in compared if not each.fitted} == {"halves", "ahead"}


def test_only_sequential_and_none_are_fitted() -> None:
    rows = made()
    wrong = [
        row
        if row.pipeline in ("none", "sequential")
        else replace(row, tokens_per_s=1.0, verify_s=9.0)
        for row in rows
    ]
    assert fit(wrong) == fit(rows)


def test_the_error_is_positive_where_the_model_predicts_too_much() -> None:
    rows = made()
    slow = replace(next(row for row in rows if row.pipeline == "ahead"), tokens_per_s=10.0)
    (found,) = compare(fit(rows), [slow])
    assert found.error == pytest.approx(found.estimate.rate / 10.0 - 1.0)
    assert found.error > 0


def test_ahead_is_predicted_with_the_lookahead_of_its_row() -> None:
    model = fit(made())
    leads = [2, 3, 7, 16, None]
    rates = [
        compare(model, [Row("ahead", 3, 1, 100.0, step_tokens=lookahead)])[0].estimate.rate
        for lookahead in leads
    ]
    assert rates[0] == rates[1] < rates[2] == rates[4]  # never less than a pass verifies
    assert rates[3] == pytest.approx(rates[2])  # all that two passes need is enough


def test_auto_is_predicted_as_the_best_of_the_three_pipelines() -> None:
    rows = made()
    model = fit(rows)
    auto = compare(model, [Row("auto", 3, 8, 100.0)])[0].estimate
    three = [c.estimate.rate for c in compare(model, rows) if (c.row.k, c.row.in_flight) == (3, 8)]
    assert auto.rate == pytest.approx(max(three))


def test_queue_is_predicted_from_its_measured_tokens() -> None:
    model = fit(made())
    (found,) = compare(model, [Row("queue", 3, 4, 100.0, accept_len=2.0)])
    assert found.estimate.tokens == 2.0
    assert found.estimate.seconds == pytest.approx(verify(4, 4) + OVERHEAD)


def test_a_pipeline_without_a_model_is_left_out() -> None:
    model = fit(made())
    assert compare(model, [Row("ngram", 3, 4, 100.0), Row("queue", 3, 4, 100.0)]) == []


def test_repeated_rows_are_replaced_by_their_median() -> None:
    rows = made(("sequential",))
    noisy = [replace(row, verify_s=5.0, tokens_per_s=0.1) for row in rows]
    assert fit([*rows, *rows, *noisy]).verify_seconds(2, 4) == pytest.approx(verify(2, 4))


def test_widths_and_requests_that_were_not_measured_are_interpolated() -> None:
    model = fit(made())
    assert model.verify_seconds(6, 4) == pytest.approx(verify(6, 4))
    assert verify(4, 4) < model.verify_seconds(4, 6) < verify(4, 8)
    assert model.alpha(4) == pytest.approx(ALPHA[3])


def test_the_fitted_time_of_a_draft_step_is_never_negative() -> None:
    rows = [Row("sequential", 1, b, 10.0, 1.9, 0.03, d) for b, d in ((1, 0.001), (2, 0.004))]
    model = fit(rows)
    assert model.step_base == 0.0
    assert 0.001 < model.step_request < 0.002


def test_the_fit_of_draft_times_minimizes_relative_errors() -> None:
    seen = ((1, 0.001), (8, 0.004), (8, 0.006))
    model = fit([Row("sequential", 1, b, 10.0, 1.9, 0.03, step) for b, step in seen])
    assert model.draft_seconds(1, 1) == pytest.approx(0.001)
    best = (1 / 0.004 + 1 / 0.006) / (1 / 0.004**2 + 1 / 0.006**2)
    assert model.draft_seconds(8, 1) == pytest.approx(best)


@pytest.mark.parametrize("rows", [[], [Row("ahead", 4, 8, 100.0, 4.0, 0.04, 0.01)]])
def test_without_sequential_rows_nothing_is_fitted(rows: list[Row]) -> None:
    with pytest.raises(TheoryError, match="no row of the pipeline 'sequential'"):
        fit(rows)


def test_a_curve_passes_through_its_points_and_extrapolates_their_direction() -> None:
    curve = Curve.through([(8, 45.0), (1, 30.0), (4, 30.0)])
    assert [curve(b) for b in (1, 2, 4, 6, 8, 16)] == [30.0, 30.0, 30.0, 37.5, 45.0, 75.0]
    assert Curve.through([(1, 10.0), (2, 1.0)])(8) == 0.5  # not below half of the last
    assert Curve.through([(4, 10.0), (8, 90.0)])(1) == 5.0


def test_rows_are_read_from_results(tmp_path: Path) -> None:
    rows = made()
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [{**asdict(row), "hidden_share": 0.5} for row in rows]}))
    assert [replace(row, k=0) if row.pipeline == "none" else row for row in rows] == read_rows(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no list of rows"),
        ('{"rows": []}', "has no list of rows"),
        ('{"rows": [3]}', "row 1 of .* is 3, but must be an object"),
        ('{"rows": [{"k": 4}]}', "pipeline in row 1 of .* is None"),
        ('{"rows": [{"pipeline": "ahead", "k": 0}]}', "k in row 1 of .* is 0, but must be an int"),
        (
            '{"rows": [{"pipeline": "ahead", "k": 4, "in_flight": 8, "tokens_per_s": "fast"}]}',
            "tokens_per_s in row 1 of .* is 'fast', but must be a number above 0",
        ),
        (
            '{"rows": [{"pipeline": "ahead", "k": 4, "in_flight": 8, "tokens_per_s": 9, '
            '"verify_s": -1}]}',
            "verify_s in row 1 of .* is -1",
        ),
    ],
)
def test_files_without_results_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(TheoryError, match=message):
        read_rows(path)


def test_predicted_tokens_are_shown_beside_measured_ones() -> None:
    row = next(row for row in made() if (row.pipeline, row.k) == ("halves", 3))
    (found,) = compare(fit(made()), [row])
    assert isinstance(found, Comparison)
    assert found.estimate.tokens == pytest.approx(expected_tokens(ALPHA[3], 3))
