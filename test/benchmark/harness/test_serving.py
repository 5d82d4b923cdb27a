"""Serving a cell: the requests to the server, and the figures read from its answers.

The cells are those of `bench_batch_parallel`, which uses all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmark.bench_batch_parallel import measure
from benchmark.harness import speculation
from benchmark.harness.cells import Cell
from benchmark.harness.run import Answer, CounterError, Counters, Gap, Run
from benchmark.harness.server import ServerError, reason
from benchmark.harness.serving import checked, keep_in_flight, prefill_seconds, read_answer
from test.benchmark.parallel.cells import cell_of

CELL = cell_of("halves", in_flight=2)
PROMPTS = ("Who?", "Where?", "When?")


def answer(ids: list[int], *, start: float = 0.0, end: float = 0.25, **meta: Any) -> dict[str, Any]:
    known = {
        "completion_tokens": len(ids),
        "e2e_latency": 2.0,
        "queue_time": 0.5,
        "forward_entry_time": start,
        "prefill_finished_time": end,
        "finish_reason": {"type": "length"},
        "qspec": {"passes": 3, "proposed_tokens": 4, "accepted_by_source": {"step": 4}},
    }
    return {"output_ids": ids, "meta_info": {**known, **meta}}


def counts(passes: int) -> dict[str, Any]:
    fields = {"requests": 2, "input_tokens": 10, "seconds": 0.03, "waited_seconds": 0.001}
    return {"passes": passes, **{name: passes * value for name, value in fields.items()}}


class FakeServer:
    """A stand-in server: answers have eight tokens, and a batch takes three passes with drafts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.passes = 0
        self.silent = 0
        """Number of next batches for which the sidecar drafts nothing."""
        self.updated = True
        self.processes: list[Any] = []

    def post(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> Any:
        self.asked.append((path, body))
        if path == "/set_internal_state":
            return [self.updated]
        if path != "/generate":
            return "Cache flushed."
        self.silent -= 1
        if self.silent < 0:
            self.passes += 3
        tokens = body["sampling_params"]["max_new_tokens"]
        return [answer(list(range(tokens))) for _ in body["text"]]

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        self.asked.append((path, body))
        ids = list(range(8))
        yield {"index": 1, **answer(ids[:2])}
        yield {"index": 0, **answer(ids[:1])}
        yield {"index": 1, **answer(ids)}
        yield {"index": 0, **answer(ids)}
        yield {"index": 0, **answer(ids)}

    def get(self, path: str, timeout: float = 1.0) -> Any:
        state = {
            "drafted_tokens": 10 * self.passes,
            "drafting_rows": 0,
            "pipelines": {"halves": counts(self.passes), "queue": counts(0), "plain": counts(9)},
            "step_seconds": 0.02 * self.passes,
            "step_passes": self.passes,
        }
        return {"internal_states": [{"qspec": state}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(speculation, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(speculation, "DRAFTING_SECONDS", 0.05)


def run(server: Any, cell: Cell = CELL, prompts: tuple[str, ...] = PROMPTS) -> Run:
    return measure(server, cell, prompts, 8)


def test_a_cell_sets_the_pipeline_warms_up_and_empties_the_cache() -> None:
    server = FakeServer()
    run(server)
    (_, slots), (_, runtime), (warm_up, first), (flush, _), (path, last) = server.asked
    assert slots == {"server_args": {"pp_max_micro_batch_size": 2}}
    assert runtime["server_args"]["qspec_mode"] == 2
    assert runtime["server_args"]["qspec_draft_token_num"] == 5
    assert (warm_up, flush[:12], path) == ("/generate", "/flush_cache", "/generate")
    assert len(first["text"]) > 2
    assert last["text"] == ["Who?", "Where?", "When?"]
    sampling = last["sampling_params"]
    assert sampling["custom_params"] == {"qspec_sources": ["step"]}
    assert (sampling["max_new_tokens"], sampling["ignore_eos"]) == (8, True)


def test_without_speculation_no_pipeline_settings_are_sent() -> None:
    server = FakeServer()
    assert run(server, cell_of("none", in_flight=2)).counters is None
    asked = [body for path, body in server.asked if path == "/set_internal_state"]
    assert asked == [{"server_args": {"pp_max_micro_batch_size": 2}}]
    assert "custom_params" not in server.asked[-1][1]["sampling_params"]


def test_auto_may_use_all_sources() -> None:
    server = FakeServer()
    run(server, cell_of("auto", in_flight=2))
    assert "custom_params" not in server.asked[-1][1]["sampling_params"]


def test_counters_cover_only_the_cell_itself() -> None:
    measured = run(FakeServer())
    assert measured.counters is not None
    total = measured.counters.total
    assert [total(name) for name in ("passes", "requests", "input_tokens")] == [3, 6, 30]
    assert measured.counters.step_seconds == pytest.approx(0.06)
    assert measured.tokens == 24


def test_a_cell_is_served_once_the_sidecar_drafts() -> None:
    server = FakeServer()
    server.silent = 2
    run(server)
    assert [path for path, _ in server.asked].count("/generate") == 4


def test_a_setting_that_the_server_refuses_is_an_error() -> None:
    server = FakeServer()
    server.updated = False
    with pytest.raises(ServerError, match="pp_max_micro_batch_size"):
        run(server)


def test_streamed_chunks_are_joined_and_each_gap_keeps_its_token_count() -> None:
    measured = run(FakeServer(), cell_of("halves", in_flight=2, streamed=True), ("a", "b"))
    assert [answer.tokens for answer in measured.answers] == [8, 8]
    assert [gap.tokens for gap in measured.gaps] == [6, 7]
    assert all(isinstance(gap, Gap) and gap.seconds >= 0 for gap in measured.gaps)


def test_prompts_that_are_prefilled_together_count_once() -> None:
    spans = [(1.0, 2.0), (1.0, 2.0), (1.5, 2.5), (4.0, 4.5)]
    answers = [answer([1], start=start, end=end) for start, end in spans]
    assert prefill_seconds(answers) == pytest.approx(2.0)


def test_decode_throughput_leaves_out_prefill_and_its_tokens() -> None:
    measured = replace(run(FakeServer()), seconds=3.25, prefill_seconds=0.25)
    assert measured.tokens_per_s == pytest.approx(24 / 3.25)
    assert measured.decode_tokens_per_s == pytest.approx(21 / 3)


def test_an_aborted_request_is_an_error() -> None:
    with pytest.raises(ServerError, match="out of memory"):
        checked(answer([], finish_reason={"type": "abort", "message": "out of memory"}))


def test_a_counter_that_decreased_is_an_error() -> None:
    server = FakeServer()
    server.passes = 5
    before = Counters.of(server.get("")["internal_states"][0]["qspec"])
    server.passes = 2
    with pytest.raises(CounterError):
        Counters.of(server.get("")["internal_states"][0]["qspec"]).since(before)


def test_an_answer_is_read_by_the_kind_of_server_that_gave_it() -> None:
    meta: dict[str, Any] = {"e2e_latency": 5.0, "queue_time": 3.5}
    body = {"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}
    plain = read_answer(body, 6.0)
    assert (plain.passes, plain.proposed, plain.service, plain.latency) == (4, 0, 1.5, 6.0)
    # SGLang fills these in for QSPEC too; there only QSPEC's own record counts.
    meta |= {"spec_verify_ct": 2, "spec_num_proposed_drafts": 22, "spec_num_correct_drafts": 2}
    ngram = read_answer(body, 6.0)
    assert (ngram.passes, ngram.proposed, ngram.accepted) == (2, 22, {"ngram": 2})
    sources = {"queue": 1, "output": 0}
    meta["qspec"] = {"passes": 3, "proposed_tokens": 7, "accepted_by_source": sources}
    qspec = read_answer(body, 6.0)
    assert (qspec.passes, qspec.proposed, qspec.accepted) == (3, 7, sources)


def test_the_reason_of_a_failure_is_the_last_line_that_names_an_error() -> None:
    log = "the server ended with code 1:\nloading\nValueError: no such kernel\nbye"
    assert reason(RuntimeError(log)) == "ValueError: no such kernel"
    assert reason(ConnectionResetError()) == "ConnectionResetError"


def test_requests_are_kept_in_flight_and_their_times_are_measured() -> None:
    together = threading.Barrier(2, timeout=60)

    def ask(prompt: str, length: int) -> Answer:
        together.wait()
        return Answer((len(prompt),) * length, 0.0, 0.0, length)

    server: Any = FakeServer()
    found = keep_in_flight(server, 2, ask, ["a", "bb", "c", "dd"], [1, 2, 3, 4])
    assert [one.output_ids for one in found.answers] == [(1,), (2, 2), (1, 1, 1), (2,) * 4]
    assert all(0 < one.latency == one.service <= found.seconds for one in found.answers)
