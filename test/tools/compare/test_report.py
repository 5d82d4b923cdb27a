"""The recommendation, the tables and the JSON."""

from __future__ import annotations

import json

from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.compare.comparison import short_names
from sglang_qspec.tools.compare.report import DraftFigures, recommendation, text_of
from sglang_qspec.tools.measure.tables import PairTimes, PassSeconds
from sglang_qspec.tools.theory.prediction import Prediction

TIMES = PairTimes(
    Curve.through([(1, 0.02), (4, 0.03)]),
    PassSeconds({(b, w): 0.04 for b in (1, 4) for w in (1, 2, 8)}),
    Curve.through([(1, 0.005), (4, 0.006)]),
)


def candidate(name: str, *speedups: float) -> DraftFigures:
    predicted = [
        Prediction(b, "ahead", 4, 50.0 * each, 50.0)
        for b, each in zip((1, 4), speedups, strict=True)
    ]
    return DraftFigures(
        name=name,
        path=f"/models/{name}",
        times=TIMES,
        greedy=[[True, True, False, True]],
        sampled=[[False, True, False, True]],
        weight_bytes=3 << 20,
        memory_bytes=5 << 20,
        dtype="bfloat16",
        quantization="gptq",
        predicted=predicted,
        predicted_sampled=predicted,
    )


def test_the_fastest_draft_model_is_recommended_for_each_load() -> None:
    text = recommendation([candidate("small", 2.0, 0.9), candidate("large", 1.5, 1.0)])
    assert text == (
        "Recommendation: take small with 1 in flight (predicted 2.00 times no speculation), and "
        "no draft model with 4 in flight (predicted 1.00 times no speculation)."
    )


def test_one_draft_model_for_all_loads_is_named_once() -> None:
    assert recommendation([candidate("small", 2.0, 1.5)]) == (
        "Recommendation: take small with 1 in flight (predicted 2.00 times no speculation) and "
        "4 in flight (predicted 1.50 times no speculation)."
    )


def test_that_none_pays_is_said_with_the_best_figure() -> None:
    text = recommendation([candidate("small", 1.04, 0.5), candidate("large", 0.7, 0.6)])
    assert "none of the draft models pays on this machine" in text
    assert "1.04 times the tokens/s of no speculation" in text


def test_the_tables_have_the_figures_of_each_candidate() -> None:
    text = text_of([candidate("small", 2.0, 1.5), candidate("large", 1.2, 1.1)], "heading")
    lines = text.splitlines()
    assert lines[0] == "heading"
    row = next(line for line in lines if line.startswith("small") and "%" in line)
    # Agreement, runs of 7 draft tokens (four tokens in two or three passes), steps, sizes.
    assert row.split()[1:] == ["75.0", "%", "50.0", "%", "1.00", "0.33", "5.0", "6.0", "3", "5"]
    assert any(line.split()[:3] == ["1", "in", "flight"] and "20.0" in line for line in lines)
    predicted = [line.split() for line in lines if "ahead, k=4" in line]
    assert predicted[1][:5] == ["small", "4", "50.0", "75.0", "1.50"]
    assert lines[-1].startswith("Recommendation: take small")


def test_the_record_is_json_with_every_figure() -> None:
    found = json.loads(json.dumps(candidate("small", 2.0, 1.5).record()))
    assert found["draft"] == "/models/small"
    assert (found["greedy_agreement"], found["sampled_agreement"]) == (0.75, 0.5)
    assert (found["greedy_accepted_run"], found["run_of"]) == (1.0, 7)
    assert found["step_ms"] == {"1": 5.0, "4": 6.0}
    assert found["predicted"][1]["in_flight"] == 4
    assert found["predicted"][1]["speedup"] == 1.5


def test_equal_names_are_told_apart_by_their_paths() -> None:
    assert short_names(["/a/x", "/b/x", "/c/y"]) == {"/a/x": "/a/x", "/b/x": "/b/x", "/c/y": "y"}
