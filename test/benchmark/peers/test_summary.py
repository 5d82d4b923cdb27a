"""The ratios of `bench_peers`."""

from __future__ import annotations

import pytest

from benchmark.harness.run import Answer, Run
from benchmark.peers.load import Cell
from benchmark.peers.summary import Summary


def run(tokens_per_s: float, token: int = 1) -> Run:
    return Run(10.0, (Answer((token,) * int(10 * tokens_per_s), 1.0, 1.0, 1),))


def test_the_smallest_ratio_over_the_fastest_peer_counts() -> None:
    runs = {
        Cell(1, 1, "qspec"): run(120),
        Cell(1, 1, "sglang"): run(60),
        Cell(1, 1, "vllm"): run(50),
        Cell(1, 1, "vllm-ngram"): run(100),
        Cell(1, 8, "qspec"): run(180, token=2),
        Cell(1, 8, "sglang"): run(180),
        Cell(1, 8, "vllm"): run(200),
    }
    record = Summary(runs).record()
    assert record["over_best_peer_min"] == pytest.approx(0.9)
    assert record["over_best_peer"]["1"]["ratio"] == pytest.approx(1.2)
    rows = {(row["peer"], row["in_flight"]): row for row in record["rows"]}
    assert rows["qspec", 1]["over_sglang"] == pytest.approx(2.0)
    assert rows["qspec", 8]["same"] == 0.0
    assert rows["sglang", 8]["tokens_per_s"] == pytest.approx(180.0)


def test_without_a_peer_there_is_no_ratio() -> None:
    summary = Summary({Cell(1, 1, "qspec"): run(120), Cell(1, 1, "sglang"): run(60)})
    assert summary.over_best_peer_min is None
    assert "–" in summary.report({}, {}).text()
