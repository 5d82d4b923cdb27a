"""Serving a cell: the requests to the server, and the figures read from its answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmark.harness import speculation
from benchmark.harness.others import Others
from benchmark.harness.run import CounterError, Counters, Run
from benchmark.harness.server import ServerError
from benchmark.harness.serving import (
    Raw,
    checked,
    keep_in_flight,
    prefill_seconds,
    read_answer,
    send_batch,
    serve,
    warm_up,
)
from benchmark.harness.speculation import update_settings

PROMPTS = ["Who?", "Where?", "When?"]


def answer(ids: list[int], *, start: float = 0.0, end: float = 0.25, **meta: Any) -> dict[str, Any]:
    known = {
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
    """A stand-in server: a batch takes three passes with drafts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.passes = 0
        self.silent = 0
        """Number of next batches for which the sidecar does nothing."""
        self.drafts = 10
        """Drafted tokens for each pass of the target."""
        self.processes: list[Any] = []
        self.rests = False
        """Whether it lets its sidecar rest."""
        self.of_head: dict[str, Any] = {}
        """What a server with a head reports besides."""

    def post(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> Any:
        self.asked.append((path, body))
        if path != "/generate":
            return [False]
        self.silent -= 1
        if self.silent < 0:
            self.passes += 3
        tokens = body["sampling_params"]["max_new_tokens"]
        return [answer(list(range(tokens))) for _ in body["text"]]

    def get(self, path: str, timeout: float = 1.0) -> Any:
        state = {
            "drafted_tokens": self.drafts * self.passes,
            "sidecar_pass_seconds": 0.03 * self.passes,
            "drafting_rows": 0,
            "pipelines": {"halves": counts(self.passes), "queue": counts(0), "plain": counts(9)},
            "step_seconds": 0.02 * self.passes,
            "step_passes": self.passes,
            "sidecars": [{"state": "ready", "rests": self.rests}],
            **self.of_head,
        }
        return {"internal_states": [{"qspec": state}]}

    def counters(self) -> Counters:
        return Counters.of(self.get("")["internal_states"][0]["qspec"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(speculation, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(speculation, "WORKING_SECONDS", 0.05)


def run(server: Any, has_sidecar: bool = True) -> Run:
    body = {"text": PROMPTS, "sampling_params": {"max_new_tokens": 8}}
    return serve(
        server,
        lambda: send_batch(server, body, 24),
        lambda: warm_up(server, 4, {}),
        has_sidecar=has_sidecar,
    )


def test_a_cell_is_warmed_up_and_served_with_an_empty_cache() -> None:
    server = FakeServer()
    assert run(server, has_sidecar=False).counters is None
    (warm, first), (flush, _), (path, last) = server.asked
    assert (warm, flush[:12], path) == ("/generate", "/flush_cache", "/generate")
    assert (len(first["text"]), last["text"]) == (4, PROMPTS)


def test_counters_cover_only_the_cell_itself() -> None:
    measured = run(FakeServer())
    assert measured.counters is not None
    total = measured.counters.total
    assert [total(name) for name in ("passes", "requests", "input_tokens")] == [3, 6, 30]
    assert measured.counters.step_seconds == pytest.approx(0.06)
    assert measured.tokens == 24


def test_a_cell_is_served_once_the_sidecar_works() -> None:
    server = FakeServer()
    server.silent = 2
    run(server)
    assert [path for path, _ in server.asked].count("/generate") == 4


def test_a_sidecar_that_has_no_time_to_draft_in_a_warm_up_works_all_the_same() -> None:
    server = FakeServer()
    server.drafts = 0
    run(server)
    assert [path for path, _ in server.asked].count("/generate") == 2


@pytest.mark.parametrize(("paused", "use"), [(True, "all"), (False, "texts"), (False, "none")])
def test_a_head_whose_drafts_do_not_pay_is_not_awaited(paused: bool, use: str) -> None:
    server = FakeServer()
    server.silent = 1 << 30
    server.of_head = {
        "proposed_tokens": {"head": 8},
        "sources": {"head": {"paused": paused}},
        "draft_trials": [{"drafts": use}],
    }
    run(server)


def test_a_sidecar_that_the_server_lets_rest_is_not_awaited() -> None:
    server = FakeServer()
    server.silent = 1 << 30
    server.rests = True
    run(server)
    assert [path for path, _ in server.asked].count("/generate") == 2


def test_a_setting_that_the_server_refuses_is_an_error() -> None:
    server: Any = FakeServer()
    with pytest.raises(ServerError, match="pp_max_micro_batch_size"):
        update_settings(server, {"pp_max_micro_batch_size": 2})


def test_prompts_that_are_prefilled_together_count_once() -> None:
    spans = [(1.0, 2.0), (1.0, 2.0), (1.5, 2.5), (4.0, 4.5)]
    answers = [answer([1], start=start, end=end) for start, end in spans]
    assert prefill_seconds(answers) == pytest.approx(2.0)
    measured = replace(run(FakeServer()), seconds=3.25, prefill_seconds=0.25)
    assert measured.tokens_per_s == pytest.approx(24 / 3.25)
    assert measured.decode_tokens_per_s == pytest.approx(21 / 3)


def test_an_aborted_request_is_an_error() -> None:
    with pytest.raises(ServerError, match="out of memory"):
        checked(answer([], finish_reason={"type": "abort", "message": "out of memory"}))


def test_a_counter_that_decreased_is_an_error() -> None:
    server = FakeServer()
    server.passes = 5
    before = server.counters()
    server.passes = 2
    with pytest.raises(CounterError):
        server.counters().since(before)


def test_an_answer_is_read_by_the_kind_of_server_that_gave_it() -> None:
    meta: dict[str, Any] = {}
    body = {"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}
    peer = read_answer(body, 6.0)
    assert (peer.passes, peer.service, peer.latency) == (4, 6.0, 6.0)
    meta |= {"e2e_latency": 5.0, "queue_time": 3.5}
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


def test_requests_are_kept_in_flight_and_their_times_are_measured() -> None:
    together = threading.Barrier(2, timeout=60)

    def ask(prompt: str, length: int) -> Raw:
        together.wait()
        return {"output_ids": [len(prompt)] * length}

    found = keep_in_flight(2, ask, ["a", "bb", "c", "dd"], [1, 2, 3, 4])
    assert [raw["output_ids"] for raw in found.raw] == [[1], [2, 2], [1, 1, 1], [2] * 4]
    assert all(latency > 0 for latency in found.latencies or [0.0])


BUSY = [sys.executable, "-c", "while True: pass"]


def test_a_process_counts_unless_it_is_the_servers() -> None:
    with subprocess.Popen(BUSY) as process:
        try:
            busy = psutil.Process(process.pid)
            server: Any = SimpleNamespace(processes=[busy])
            stranger: Any = SimpleNamespace(processes=[])
            its_own, foreign = Others(server), Others(stranger)
            began = sum(busy.cpu_times()[:2])
            while sum(busy.cpu_times()[:2]) < began + 0.5:
                pass
            assert foreign.share() > its_own.share()
        finally:
            process.kill()
