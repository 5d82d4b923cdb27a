"""What `bench_overhead --sidecar` measures, on a clock that only the model's passes move."""

from __future__ import annotations

import json

import pytest

from benchmark import bench_overhead
from benchmark.overhead import sidecar
from benchmark.overhead.sidecar import (
    LOADS,
    TOKEN,
    TOKENS,
    StubbedModel,
    StubbedSidecar,
    stubs,
    waiting,
)
from sglang_qspec import transfers
from sglang_qspec.sidecar.burst import MOST_BURSTS, MOST_PASSES
from sglang_qspec.sidecar.sampler import Sampler

STEP_S, PREFILL_S = 0.25, 100.0


@pytest.fixture
def _passes_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, now = StubbedModel._forward, [0.0]

    def taking_time(model: StubbedModel, **fields: object) -> object:
        now[0] += PREFILL_S if "extend_num_tokens" in fields else STEP_S
        return forward(model, **fields)

    monkeypatch.setattr(StubbedModel, "_forward", taking_time)
    monkeypatch.setattr("time.thread_time", lambda: now[0])


@pytest.mark.usefixtures("_passes_take_time")
@pytest.mark.parametrize("name", LOADS)
def test_the_time_is_that_of_a_pass_and_not_that_of_reading_prompts(name: str) -> None:
    with stubs():
        load = LOADS[name](16)
    assert load.step_ms == pytest.approx(1e3 * STEP_S)
    assert load.model.prefills > 0


def test_waiting_requests_get_all_tokens_of_their_completions() -> None:
    with stubs():
        load = waiting(16, 8)
    assert load.drafter.statistics.drafted_tokens == 16 * TOKENS
    (prompt, _) = load.drafter.queue.prompts.values()
    assert [list(each.token_ids) for each in prompt.completions] == [[TOKEN] * TOKENS] * 8
    # All but the first token, which comes from reading the prompt, are drafted in full passes.
    assert load.model.steps == TOKENS - 1


def test_each_request_has_a_step_draft_of_the_committed_tokens() -> None:
    with stubs():
        load = LOADS["step drafts"](4)
    assert load.model.prefills == 1
    assert load.commits_ms is not None
    (drafts,) = {
        subscription.step_draft.completion.text.known_len
        for prompt in load.drafter.queue.prompts.values()
        for subscription in prompt.subscriptions.values()
        if subscription.step_draft is not None
    }
    assert drafts == sidecar.COMMITS


def test_nothing_is_stubbed_afterwards() -> None:
    with stubs():
        during = (transfers._upload, Sampler.draw)
    assert transfers._upload not in during
    assert Sampler.draw not in during


def test_the_command_prints_each_load_and_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_overhead", "--sidecar", "8"])
    monkeypatch.setattr(sidecar, "ROUNDS", 1)
    monkeypatch.setattr(sidecar, "TOKENS", 32)
    bench_overhead.main()
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert [row["load"] for row in rows] == list(LOADS)
    for row in rows:
        assert 0.0 < row["least_ms"] <= row["step_ms"] <= row["most_ms"]
        assert any(line.startswith(row["load"]) for line in lines)
    assert [row["commits_ms"] is None for row in rows] == [True, True, False]


def test_a_drafter_drafts_in_bursts_as_on_a_gpu() -> None:
    with stubs():
        load = StubbedSidecar(4)
        load.submit(1, 1)
        load.step()
        load.step()
    assert load.model.steps == MOST_PASSES * MOST_BURSTS
