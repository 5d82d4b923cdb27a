"""A pass advances the right completions if the KV is too small for all of them."""

import itertools
import random
from collections.abc import Iterable

import pytest

from sglang_qspec.link import Peer
from sglang_qspec.sidecar.batch_scheduler import BatchScheduler, DraftBatch
from sglang_qspec.sidecar.text import Completion, Text
from test.sidecar.drafter_driver import DrafterDriver
from test.sidecar.scripted import ScriptedModel

ROWS = 10


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning may try again once per row: each trial after the first takes a row."""
    trials = 0
    plan, fill = BatchScheduler.plan, BatchScheduler._fill

    def counting_plan(
        self: BatchScheduler, alone: Text | None = None, *, by_worth: bool = False
    ) -> DraftBatch | None:
        nonlocal trials
        trials = 0
        return plan(self, alone, by_worth=by_worth)

    def counting_fill(self: BatchScheduler, candidates: Iterable[Completion]) -> DraftBatch:
        nonlocal trials
        trials += 1
        assert trials <= ROWS + 1, "the plan never becomes one that fits"
        return fill(self, candidates)

    monkeypatch.setattr(BatchScheduler, "plan", counting_plan)
    monkeypatch.setattr(BatchScheduler, "_fill", counting_fill)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes a second, so that turns do not depend on the machine."""
    monkeypatch.setattr(
        "sglang_qspec.sidecar.pass_runner.time.monotonic", itertools.count().__next__
    )


@pytest.mark.parametrize("seed", [6338, *range(60)])
def test_planning_ends_when_several_servers_want_more_kv_than_there_is(seed: int) -> None:
    """Seed 6338 once gave a completion its row back in each trial, right after it was taken."""
    rng = random.Random(seed)
    model = ScriptedModel(tokens=rng.choice([60, 100, 160]), rows=ROWS)
    driver = DrafterDriver(
        model,
        slots=6,
        prefill_tokens=rng.choice([8, 24]),
        max_completion_tokens=12,
        apart=rng.random() < 0.3,
    )
    servers = [Peer(str(number), bytes([number])) for number in range(3)]
    for request in range(14):
        if rng.random() < 0.7:
            server, size = servers[rng.randrange(3)], rng.choice([3, 20, 50, 90])
            first = rng.choice([0, 7])
            if rng.random() < 0.5:  # a common prefix
                token_ids = [(first + place) % 90 + 1 for place in range(size)]
            else:
                token_ids = [rng.randrange(1, 900) for _ in range(size)]
            driver.submit(
                f"r{request}",
                token_ids,
                peer=server,
                completions=rng.choice([1, 1, 3]),
                max_new_tokens=rng.choice([1, 10]),
            )
        for _ in range(rng.choice([0, 1, 1, 2])):
            driver.step()
    driver.run()
    driver.drafter.check_integrity()
    assert driver.drafter.idle
