"""The model that answers at once, the tenants, and the figures of `bench_fleet`."""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.fleet.serving import INSTANT, sidecar
from benchmark.fleet.summary import summarize, table
from benchmark.fleet.tenants import Demand, run
from sglang_qspec.link import PrivateEndpoint


def measured(tokens_per_s: float, **changes: float) -> dict[str, float]:
    shares = {"model": 0.5, "sampling": 0.2, "link": 0.1, "idle": 0.05, "sidecar_cpu": 1.0}
    seen = {"request_ms": 40.0, "fairness": 0.9, "tenants_cpu": 0.5, "declined": 0.0}
    return {"tokens_per_s": tokens_per_s, "received_per_s": 90.0, **shares, **seen, **changes}


def test_figures_are_medians_and_each_model_compares_with_its_fewest_tenants() -> None:
    runs = {
        ("draft model", 1): [measured(100), measured(140), measured(120)],
        ("draft model", 8): [measured(360), measured(300), measured(240, fairness=0.3)],
        ("instant", 1): [measured(1000)],
        ("instant", 64): [measured(500, link=0.4)],
    }
    rows = summarize(runs)
    assert [row["over_one"] for row in rows] == [1.0, 2.5, 1.0, 0.5]
    record = rows[1]
    assert record["tokens_per_s"] == 300
    assert record["tokens_per_s_spread"] == [240, 360]
    assert record["fairness"] == 0.9
    assert record["model_share"] == 0.5
    assert record["idle_share"] == 0.05
    assert record["drafter_share"] == 0.15
    assert rows[3]["drafter_share"] == 0
    assert "model" in record
    text = table("Fleet", rows).text()
    assert "240 to 360" in text
    assert "50%" in text


def test_a_request_that_outlasts_the_measurement_has_no_time() -> None:
    (row,) = summarize(
        {("draft model", 8): [measured(1), measured(2, request_ms=math.nan), measured(3)]}
    )
    assert row["request_ms"] is None
    assert " nan" not in table("Fleet", [row]).text()


def test_tenants_get_equal_parts_of_a_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.fleet.serving.pin", str)
    options = argparse.Namespace(cores="0", tokens=8, device="cpu")
    serve = sidecar(INSTANT, options)
    with PrivateEndpoint() as endpoint, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(serve, (endpoint.address, 0.5, 1.5))
        found = run(endpoint.address, 3, Demand(2, 16, 8, 2), 0.5, 1.0, answer.done)
        served = answer.result()
    assert served["tokens_per_s"] > 0
    assert found["received_per_s"] > 0
    assert found["fairness"] > 0
    assert found["declined"] == 0
    assert found["request_ms"] > 0
