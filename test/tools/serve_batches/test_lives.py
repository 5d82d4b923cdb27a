"""The life of batches whose service is killed, cancelled, late, or out of disk space."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from sglang_qspec.policy.deadlines import LINE_TOKENS
from sglang_qspec.tools.serve_batches.command import predicted
from test.tools.batch.fake_server import FakeServer, text_of
from test.tools.batch.fakes import serving
from test.tools.serve_batches.gateway import (
    Gateway,
    begin,
    ended,
    line,
    records,
    until,
    upload,
)

IN_FLIGHT = 16


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer(delay=0.01, slots=8)


@pytest.fixture
def gateway(fake: FakeServer, tmp_path: Path) -> Iterator[Gateway]:
    with serving(fake) as url:
        found = Gateway(tmp_path / "folder", "--url", url, "--in-flight", IN_FLIGHT)
        found.start()
        try:
            yield found
        finally:
            found.kill()


def answers(client: openai.OpenAI, file: str | None) -> dict[str, str]:
    """The texts of answers by custom_id, each of which comes once."""
    found = records(client, file)
    counts = Counter(each["custom_id"] for each in found)
    assert set(counts.values()) <= {1}
    return {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in found
    }


def kill_at_random(
    gateway: Gateway, fake: FakeServer, *, count: int, kills: int, seed: int, pause: float
) -> None:
    """Serve a batch of `count` lines while the service is killed; check that no line is lost."""
    chance = random.Random(seed)
    client = gateway.client()
    lines = [line(f"prompt {i}") for i in range(count)]
    batch = begin(client, upload(client, lines))
    seen: list[str] = []
    for _ in range(kills):
        time.sleep(chance.random() * pause)
        seen.append(client.batches.retrieve(batch.id).status)
        gateway.kill()
        gateway.start()
    done = ended(client, batch.id)
    seen.append(done.status)
    order = ["validating", "in_progress", "finalizing", "completed"]
    assert [order.index(status) for status in seen] == sorted(order.index(each) for each in seen)
    assert done.status == "completed"
    found = answers(client, done.output_file_id)
    assert found == {f"prompt {i}": text_of(f"prompt {i}") for i in range(count)}
    assert not list((gateway.folder / "running").iterdir())
    assert len(client.files.list().data) == 2  # the input and one output
    assert len(fake.order) <= count + kills * IN_FLIGHT  # other lines are asked once


def test_a_killed_service_loses_no_line_and_repeats_none(
    gateway: Gateway, fake: FakeServer
) -> None:
    kill_at_random(gateway, fake, count=3000, kills=4, seed=5, pause=1.0)


@pytest.mark.thorough
def test_fifty_thousand_lines_survive_twenty_kills(gateway: Gateway, fake: FakeServer) -> None:
    kill_at_random(gateway, fake, count=50_000, kills=20, seed=11, pause=8.0)


def test_a_cancelled_batch_keeps_its_answers(gateway: Gateway, fake: FakeServer) -> None:
    client = gateway.client()
    batch = begin(client, upload(client, [line(f"prompt {i}") for i in range(20_000)]))
    until(lambda: len(fake.order) > 50, "lines are asked")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert done.cancelling_at is not None
    assert done.cancelled_at is not None
    assert done.request_counts is not None
    assert 0 < done.request_counts.completed < done.request_counts.total == 20_000
    assert len(answers(client, done.output_file_id)) == done.request_counts.completed
    asked = len(fake.order)
    time.sleep(0.3)
    assert len(fake.order) == asked  # no line of it is asked any more
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_that_expires_keeps_its_answers_and_names_the_rest(gateway: Gateway) -> None:
    client = gateway.client()
    count = 20_000
    file = upload(client, [line(f"prompt {i}") for i in range(count)])
    done = ended(client, begin(client, file, "3s").id)
    assert done.status == "expired"
    assert done.expired_at is not None
    assert done.expired_at >= (done.expires_at or 0)
    answered = answers(client, done.output_file_id)
    late = records(client, done.error_file_id)
    assert answered
    assert {each["error"]["code"] for each in late} == {"batch_expired"}
    assert len(answered) + len(late) == count
    assert not answered.keys() & {each["custom_id"] for each in late}


def test_lines_make_room_for_the_requests_of_others_and_come_back(tmp_path: Path) -> None:
    fake = FakeServer(delay=0.4, slots=8)
    with serving(fake) as url:
        gateway = Gateway(tmp_path / "folder", "--url", url, "--in-flight", IN_FLIGHT)
        gateway.start()
        try:
            client = gateway.client()
            prompts = [f"prompt {i}" for i in range(60)]
            batch = begin(client, upload(client, [line(prompt) for prompt in prompts]))
            until(lambda: fake.most == IN_FLIGHT, "the server has its depth")
            fake.others = 6
            until(lambda: fake.now <= 1, "lines make room")
            fake.most = 0
            time.sleep(1.0)
            # One more while the server still counts lines that left it, on a slow machine.
            assert fake.most <= 2
            fake.others = 0
            until(lambda: fake.now > 2, "lines come back")
            done = ended(client, batch.id)
            assert sorted(answers(client, done.output_file_id)) == sorted(prompts)
            again = sum(fake.asked.values()) - len(prompts)
            assert 0 < again <= 2 * IN_FLIGHT
        finally:
            gateway.kill()


def test_the_batch_that_is_due_first_is_answered_first(gateway: Gateway, fake: FakeServer) -> None:
    client = gateway.client()
    late = begin(client, upload(client, [line(f"late {i}") for i in range(4000)]), "24h")
    until(lambda: len(fake.order) > 20, "lines are asked")
    soon = begin(client, upload(client, [line(f"soon {i}") for i in range(100)]), "1h")
    assert ended(client, soon.id).status == "completed"
    assert client.batches.retrieve(late.id).status == "in_progress"
    client.batches.cancel(late.id)
    ended(client, late.id)


def test_a_batch_that_cannot_be_done_in_time_fails_at_once_if_deadlines_are_strict(
    tmp_path: Path,
) -> None:
    with serving(FakeServer(delay=0.05, slots=1)) as url:  # 20 lines/s
        options = ("--url", url, "--in-flight", 1, "--strict-deadlines")
        gateway = Gateway(tmp_path / "folder", *options)
        gateway.start()
        try:
            client = gateway.client()
            file = upload(client, [line(f"prompt {i}") for i in range(5000)])
            first = begin(client, file)

            def estimate() -> float | None:
                figures = (client.batches.retrieve(first.id).model_extra or {})["qspec"]
                seconds: float | None = figures["estimated_seconds"]
                return seconds

            until(lambda: estimate() is not None, "the speed is known")
            assert 60 < (estimate() or 0.0) < 6000
            late = ended(client, begin(client, file, "10s").id)
            assert late.status == "failed"
            assert late.errors is not None
            assert late.errors.data is not None
            assert late.errors.data[0].code == "deadline_unreachable"
            assert client.batches.retrieve(first.id).status == "in_progress"
        finally:
            gateway.kill()


def test_the_first_estimate_is_kept_beside_what_came(tmp_path: Path) -> None:
    with serving(FakeServer(delay=0.01)) as url:
        gateway = Gateway(tmp_path / "folder", "--url", url, "--tables", "H100:8B:0.6B")
        gateway.start()
        try:
            client = gateway.client()
            file = upload(client, [line(f"prompt {i}") for i in range(200)])
            figures = (ended(client, begin(client, file).id).model_extra or {})["qspec"]
            expected = 200 * LINE_TOKENS / predicted("H100:8B:0.6B")
            assert figures["planned_seconds"] == pytest.approx(expected, abs=0.1)
        finally:
            gateway.kill()


def test_a_full_disk_stops_a_batch_until_there_is_room(gateway: Gateway) -> None:
    client = gateway.client()
    batch = begin(client, upload(client, [line(f"prompt {i}") for i in range(3000)]))
    assert gateway.process is not None
    process = psutil.Process(gateway.process.pid)
    usual = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (400_000, usual[1]))  # as a disk that fills up
    try:

        def waits() -> bool:
            figures = client.batches.retrieve(batch.id).model_extra or {}
            return "cannot be written" in (figures["qspec"]["waits_for"] or "")

        until(waits, "the batch waits")
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert 0 < counts.completed < counts.total
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, usual)
    done = ended(client, batch.id)
    assert done.status == "completed"
    assert len(answers(client, done.output_file_id)) == 3000
