"""The time of a decode step is the difference of two answers, without their prefill."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.gpu_check import plain


class Server:
    """Takes 5 s for a prefill and `step` seconds for each further token."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.now = 0.0
        self.asked: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> None:
        assert path == "/generate"
        self.asked.append(body)
        CLOCK.now += 5.0 + self.step * body["sampling_params"]["max_new_tokens"]


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


def test_each_row_compares_the_steps_of_the_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "time", CLOCK)
    servers: Any = [Server(0.006), Server(0.008)]
    rows = plain.measure(servers, (1, 4), (8, 24))
    assert [(row["kind"], row["requests"]) for row in rows] == [
        *(("greedy", 1), ("greedy", 4), ("sampled", 1), ("sampled", 4)),
    ]
    for row in rows:
        assert row["plain_ms"] == pytest.approx(6.0)
        assert row["qspec_ms"] == pytest.approx(8.0)
        assert row["ratio"] == pytest.approx(0.75)
    for server in servers:
        params = [body["sampling_params"] for body in server.asked]
        assert all(one["ignore_eos"] and not any(one["custom_params"].values()) for one in params)
        assert {len(body["input_ids"]) for body in server.asked} == {1, 4}
