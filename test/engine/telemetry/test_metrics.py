"""The metrics follow the speculator, at most once a second, and count only output."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.telemetry.first_drafts import WINDOW, FirstDrafts
from sglang_qspec.engine.telemetry.metrics import PUBLISH_INTERVAL_S, DraftMetrics
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Submit
from sglang_qspec.policy.sources import FIRST_PAUSE_S
from sglang_qspec.trie import Source, TrieLimits, TrieStore
from test.engine.simulation import Clock
from test.engine.speculating import finish_pass

DRAFT = (Source.GUESS, 0, 0)
"""Source, stream and base of a draft."""
LABELS = {"model_name": "m", "tp_rank": 0}


class Watched:
    """A speculator with its metrics; the drafts of its sidecar count up from the last token."""

    def __init__(self, **link: Any) -> None:
        self.clock = Clock()
        self.link = FakeSidecarLink(counting, vocab_size=1000, **link)
        limits = TrieLimits(vocab_size=1000, max_request_tokens=256, max_total_tokens=4096)
        self.active = Speculator(
            QSpecConfig(), 1000, TrieStore(limits), Opened((self.link,)), self.clock
        )
        self.registry = CollectorRegistry()
        self.metrics = DraftMetrics(LABELS, self.registry, self.clock)
        self.active.first_drafts.observer = self.metrics.first_draft.observe
        self.active.poll()

    def enqueue(self, rid: str) -> None:
        self.active.enqueue(
            rid, prompt_ids=[5, 6, 7], output_ids=[], max_new_tokens=30, stop_token_ids=[]
        )

    def described(self) -> dict[str, Any]:
        return {**self.active.describe(), "speculation": "on"}

    def series(self, name: str, **labels: str) -> float | None:
        self.metrics.publish(self.described())
        return self.shown(name, **labels)

    def shown(self, name: str, **labels: str) -> float | None:
        ours = {"model_name": "m", "tp_rank": "0", **labels}
        return self.registry.get_sample_value("sglang:qspec_" + name, ours)


def counting(submit: Submit) -> Sequence[Sequence[int]]:
    last = submit.token_ids[-1]
    return [[last + step for step in range(1, 13)]] * submit.completions


def test_accepted_and_proposed_tokens_are_counted_by_source() -> None:
    watched = Watched()
    watched.enqueue("a")
    watched.active.poll()
    trees = watched.active.propose(["a"], [[8]], 4)
    finish_pass(watched.active, ["a"], trees, [[1, 2]], [11])
    assert watched.series("proposed_tokens_total", source="queue") == 3
    assert watched.series("accepted_tokens_total", source="queue") == 2
    assert watched.series("accepted_tokens_total", source="guess") == 0


def test_tokens_accepted_past_the_end_are_not_counted() -> None:
    watched = Watched()
    watched.enqueue("a")
    watched.active.poll()
    trees = watched.active.propose(["a"], [[8]], 8)
    finish_pass(watched.active, ["a"], trees, [[1, 2, 3, 4]], [13])
    # One token from prefill, and three draft tokens.
    tally = watched.active.end("a", 4)
    assert tally is not None
    assert watched.series("accepted_tokens_total", source="queue") == 3
    assert sum(tally.accepted.values()) == 3
    assert tally.record()["accept_length"] == 3.0


def test_the_time_to_the_first_draft_runs_from_queueing_and_is_taken_once() -> None:
    watched = Watched(delay=3, interval=1)
    queued_at = watched.clock.now
    watched.enqueue("a")
    while watched.active.first_drafts.count == 0:
        watched.clock.now += 0.3
        watched.active.poll()
    took = watched.clock.now - queued_at
    assert took > 0.6
    for _ in range(9):
        watched.clock.now += 5
        watched.active.poll()
    assert watched.series("queue_to_first_draft_seconds_count") == 1
    assert watched.series("queue_to_first_draft_seconds_sum") == pytest.approx(took)
    described = watched.active.describe()["queue_to_first_draft_seconds"]
    assert described == {"count": 1, "p50": pytest.approx(took), "p99": pytest.approx(took)}


def test_a_request_is_in_flight_until_its_last_completion_is_finished() -> None:
    watched = Watched(interval=1)
    watched.enqueue("a")
    watched.enqueue("b")
    watched.active.poll()
    assert watched.series("requests_in_flight") == 2
    watched.active.end("b")
    assert watched.series("requests_in_flight") == 1
    for _ in range(20):
        watched.active.poll()
    assert watched.series("requests_in_flight") == 0
    assert watched.series("live_requests") == 1


def test_a_live_request_waits_until_it_is_served() -> None:
    watched = Watched()
    watched.enqueue("a")
    watched.enqueue("b")
    assert watched.series("waiting_requests") == 2
    watched.active.admit("a")
    assert watched.series("waiting_requests") == 1
    assert watched.series("live_requests") == 2


def test_a_lost_sidecar_has_nothing_in_flight_and_its_state_is_shown() -> None:
    watched = Watched(interval=1)
    watched.enqueue("a")
    assert watched.series("sidecar_state", state="ready") == 1
    watched.link.die()
    watched.active.poll()
    assert watched.series("requests_in_flight") == 0
    assert watched.series("sidecar_state", state="ready") == 0
    assert watched.series("sidecar_state", state="lost") == 1


def test_drops_and_refused_chunks_are_counted_by_kind() -> None:
    watched = Watched()
    watched.link.queue_full = True
    watched.enqueue("a")
    assert watched.series("dropped_messages_total", kind="to_sidecar") == 1
    trie = watched.active._tries.get("a")
    assert trie is not None
    for start in (0, 9):
        watched.active._tries.insert("a", trie.serial, *DRAFT, start, [1, 2])
    assert watched.series("refused_chunks_total", reason="gap") == 1
    assert watched.series("refused_chunks_total", reason="added") is None


def test_the_state_of_speculation_and_paused_sources_are_shown() -> None:
    watched = Watched()
    for state in ("off", "failed", "on"):
        watched.metrics.publish({**watched.described(), "speculation": state})
        shown = [watched.shown("speculation_state", state=s) for s in ("on", "off", "failed")]
        assert shown == [state == "on", state == "off", state == "failed"]
    assert watched.series("source_paused", source="prompt") == 0
    watched.active.sources.observe(Source.PROMPT, 100, 0, cost=1.0)
    assert watched.series("source_paused", source="prompt") == 1
    assert watched.series("source_paused", source="queue") == 0
    watched.clock.now += FIRST_PAUSE_S
    assert watched.series("source_paused", source="prompt") == 0


def test_passes_are_counted_by_pipeline() -> None:
    watched = Watched()
    watched.active.totals.note_pass("ahead", 3, 24, seconds=0.5, waited=0.25)
    watched.active.totals.note_pass("ahead", 2, 8, seconds=0.25, waited=0.0)
    counted = {"passes": 2, "pass_requests": 5, "pass_input_tokens": 32, "pass_seconds": 0.75}
    for name, count in {**counted, "waited_seconds": 0.25}.items():
        assert watched.series(f"{name}_total", pipeline="ahead") == count
        assert watched.shown(f"{name}_total", pipeline="queue") == 0


def test_link_seconds_count_work_on_the_link_that_policies_have_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched()
    receive = watched.link.receive

    def slow(limit: int) -> Sequence[Any]:
        watched.clock.now += 0.5
        return receive(limit)

    monkeypatch.setattr(watched.link, "receive", slow)
    watched.active.poll()
    assert watched.active.take_link_seconds() == pytest.approx(0.5)
    watched.active.poll()
    assert watched.active.take_link_seconds() == pytest.approx(0.5)
    assert watched.active.take_link_seconds() == 0
    assert watched.series("link_seconds_total") == pytest.approx(1.0)


def test_series_change_at_most_once_a_second() -> None:
    watched = Watched()
    watched.metrics.publish_due(watched.described)
    watched.enqueue("a")
    watched.metrics.publish_due(watched.described)
    assert watched.shown("live_requests") == 0
    watched.clock.now += PUBLISH_INTERVAL_S
    watched.metrics.publish_due(watched.described)
    assert watched.shown("live_requests") == 1


def sidecar(number: int, **changes: object) -> dict[str, object]:
    """An entry of the list `sidecars`."""
    entry = {"number": number, "endpoint": f"ipc:///{number}", "state": "ready", "requests": 0}
    totals = {
        "drafted_tokens": 0,
        "pass_seconds": 0.0,
        "guessed_tokens": 0,
        "right_guesses": 0,
        "dropped_messages": 0,
    }
    return {**entry, **totals, **changes}


def publish(watched: Watched, *sidecars: dict[str, object]) -> None:
    watched.metrics.publish({**watched.described(), "sidecars": sidecars})


def test_a_new_sidecars_smaller_total_counts_from_zero() -> None:
    watched = Watched()
    for total, expected in ((50, 50), (70, 70), (20, 90)):
        publish(watched, sidecar(0, drafted_tokens=total))
        assert watched.shown("drafted_tokens_total") == expected


def test_a_restart_of_one_of_several_sidecars_counts_only_its_new_tokens() -> None:
    watched = Watched()
    for one, other, expected in ((50, 10, 60), (70, 30, 100), (5, 30, 105), (6, 31, 107)):
        publish(
            watched,
            sidecar(0, drafted_tokens=one, dropped_messages=one),
            sidecar(1, drafted_tokens=other, dropped_messages=other),
        )
        assert watched.shown("drafted_tokens_total") == expected
        assert watched.shown("dropped_messages_total", kind="from_sidecar") == expected
    publish(watched, sidecar(1, drafted_tokens=40))
    assert watched.shown("drafted_tokens_total") == 116


def test_tokens_of_a_sidecar_that_is_removed_and_added_again_count_once() -> None:
    watched = Watched()
    for sidecars in ([40], [], [0], [45]):
        publish(watched, *(sidecar(0, drafted_tokens=count) for count in sidecars))
    assert watched.shown("drafted_tokens_total") == 45


def test_each_sidecar_has_its_own_series_until_it_is_removed() -> None:
    watched = Watched()
    publish(watched, sidecar(0, requests=3), sidecar(1, requests=4, state="lost"))
    assert watched.shown("sidecar_ready", sidecar="0") == 1
    assert watched.shown("sidecar_ready", sidecar="1") == 0
    assert watched.shown("sidecar_requests", sidecar="1") == 4
    publish(watched, sidecar(1, requests=7))
    shown = watched.shown("sidecar_ready", sidecar="0")
    assert shown is not None
    assert math.isnan(shown)
    assert watched.shown("sidecar_requests", sidecar="0") == 0
    assert watched.shown("sidecar_requests", sidecar="1") == 7
    assert watched.shown("sidecar_requests", sidecar="2") is None


def test_a_pass_without_drafts_proposes_nothing() -> None:
    watched = Watched()
    watched.enqueue("a")
    finish_pass(
        watched.active, ["a"], watched.active.propose(["a"], [[8]], 4, drafts=False), [[]], [9]
    )
    assert sum(watched.active.describe()["proposed_tokens"].values()) == 0


def test_percentiles_cover_the_latest_requests() -> None:
    times = FirstDrafts()
    assert times.describe() == {"count": 0, "p50": None, "p99": None}
    for seconds in [1000.0] * WINDOW + [float(second) for second in range(WINDOW)]:
        times.observe(seconds)
    assert times.describe() == {"count": 2 * WINDOW, "p50": WINDOW / 2, "p99": 0.99 * WINDOW}


def test_the_backlog_and_the_overload_of_the_sidecar_are_shown() -> None:
    watched = Watched()
    watched.metrics.publish(
        {**watched.described(), "sidecar_backlog_seconds": 12.5, "sidecar_overload": 3}
    )
    assert watched.shown("sidecar_backlog_seconds") == 12.5
    assert watched.shown("sidecar_overload") == 3
