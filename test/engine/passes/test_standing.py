"""Without overlap, one decision stands for several passes without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine import speculation
from sglang_qspec.engine.passes import leader
from sglang_qspec.engine.passes.decide import standing
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.trie import DraftTrees
from test.engine.passes.stub_engine import Engine, Req, noted_decisions
from test.engine.simulation import Clock
from test.engine.speculating import enqueue, make


@pytest.fixture
def engine(clock: Clock) -> Iterator[Engine]:
    found = Engine(make(None), clock, overlap=False)
    launcher: Any = found.worker._launcher
    launch = launcher.plain

    def plain(decided: Pass) -> None:
        launch(decided)
        clock.now += 0.5

    launcher.plain = plain
    yield found
    speculation.deactivate()


@pytest.fixture
def decisions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_decisions(engine, monkeypatch)


def serve(engine: Engine, passes: int) -> None:
    """Decode passes, each of which is complete before the next one is decided."""
    for _ in range(passes):
        engine.worker.forward_batch_generation(engine.batch())
        for req in engine.reqs:
            req.output_ids.append(9)


def test_passes_over_the_same_requests_share_a_decision(
    engine: Engine, decisions: list[int]
) -> None:
    prefill: Any = SimpleNamespace(reqs=[], extend_num_tokens=1)
    serve(engine, 2 * standing.PASSES + 1)
    assert decisions == [2, 2, 2]
    engine.reqs = [*engine.reqs, Req("c")]
    serve(engine, 2)
    assert decisions == [2, 2, 2, 3]
    engine.leader.prepare_prefill(prefill)
    serve(engine, 2)
    assert decisions == [2, 2, 2, 3, 3]


def test_a_request_that_may_get_drafts_is_decided_pass_by_pass(
    engine: Engine, decisions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine.active, "propose", lambda rids, *_, **__: DraftTrees.roots(len(rids))
    )
    serve(engine, 3)
    enqueue(engine.active, "a", output_ids=engine.reqs[0].output_ids, max_new_tokens=50)
    serve(engine, 3)
    assert len(decisions) == 4
    engine.active.end("a")
    serve(engine, 3)
    assert len(decisions) == 5


def test_every_token_is_committed_and_every_pass_counted(
    engine: Engine, decisions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "MAX_LAG", 3)
    enqueue(engine.active, "a", output_ids=[8], max_new_tokens=50)
    engine.runtime.enabled = False
    live = engine.active.live("a")
    assert live is not None
    lens = []
    for _ in range(7):
        serve(engine, 1)
        lens.append(len(live.output_ids))
    assert lens == [1, 1, 3, 3, 3, 6, 6]  # the tokens before the pass
    assert len(decisions) == 1
    engine.active.propose(["a"], [engine.reqs[0].output_ids], 4)
    assert live.output_ids == [8] + [9] * 7
    tally = engine.active.end("a")
    assert tally is not None
    assert tally.passes == engine.active.totals.pipelines["queue"].passes == 7
