"""The loads of `bench_batches`: a batch of the service, and chats with their first tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.batches.loads import Service, first_token_times
from test.tools.batch.fake_server import TOKENS, FakeServer
from test.tools.batch.fakes import serving


def test_a_batch_is_counted_while_it_runs_and_can_be_cancelled(tmp_path: Path) -> None:
    fake = FakeServer(delay=0.01)
    with serving(fake) as url:
        service = Service(url, tmp_path / "service")
        try:
            service.start()
            assert service.tokens() == 0
            batch = service.begin([f"prompt {n}" for n in range(5000)], 8)
            while not (tokens := service.tokens()):
                time.sleep(0.05)
            service.cancel(batch)
        finally:
            service.stop()
    assert tokens % TOKENS == 0
    assert TOKENS <= tokens <= TOKENS * len(fake.order) < TOKENS * 5000


def test_the_time_to_the_first_token_is_that_from_the_arrival_to_the_first_text() -> None:
    asked: dict[str, float] = {}
    ended: dict[str, float] = {}
    began = time.monotonic()

    def stream(_path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompt = body["messages"][0]["content"]
        asked[prompt] = time.monotonic() - began
        for wait, text in ((0.0, ""), (0.2, "a"), (0.3, "b")):
            time.sleep(wait)
            ended[prompt] = time.monotonic() - began
            yield {"choices": [{"delta": {"content": text}}]}

    server: Any = SimpleNamespace(stream=stream)
    arrivals = {"x": 0.0, "y": 0.1}
    times = first_token_times(server, [*arrivals], [*arrivals.values()], 2)
    for found, (prompt, arrival) in zip(times, arrivals.items(), strict=True):
        assert asked[prompt] >= arrival
        assert 0.2 <= found < ended[prompt] - arrival
    silent: Any = SimpleNamespace(stream=lambda *_: iter(()))
    with pytest.raises(RuntimeError, match="has no text"):
        first_token_times(silent, ["x"], [0.0], 2)
