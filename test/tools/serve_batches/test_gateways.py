"""Several gateways with one PostgreSQL database and one folder: a killed one loses nothing."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_qspec.tools.serve_batches.database import SCHEMA_NAME
from sglang_qspec.tools.serve_batches.store import LEASE_S
from test.tools.batch.fake_server import HALF, FakeServer, text_of
from test.tools.batch.fakes import serving
from test.tools.serve_batches.gateway import Gateway, begin, ended, line, records, until, upload
from test.tools.serve_batches.postgres import Postgres, postgres

IN_FLIGHT = 16
OPTIONS = ("--in-flight", IN_FLIGHT)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as found:
        yield found


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer(delay=0.02, slots=8)


@pytest.fixture
def pair(
    server: Postgres, fake: FakeServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Gateway, Gateway]]:
    url = server.new_url(request.node.name[:60])
    with serving(fake) as target:
        given = ("--database", url, "--url", target, *OPTIONS)
        found = [Gateway(tmp_path / "folder", *given) for _ in range(2)]
        for each in found:
            each.start()
        try:
            yield found[0], found[1]
        finally:
            for each in found:
                each.kill()


def check_answers(client: openai.OpenAI, output: str | None, prompts: list[str]) -> None:
    """Check that each prompt has one answer, and the right one."""
    found = records(client, output)
    counts = Counter(each["custom_id"] for each in found)
    assert counts == Counter(prompts)
    for each in found:
        choice = each["response"]["body"]["choices"][0]
        assert choice["message"]["content"] == text_of(each["custom_id"])


def tokens_of(gateway: Gateway) -> float:
    """Output tokens of the answers that this gateway has got."""
    text = httpx.get(f"{gateway.url}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "qspec_batches_tokens_total" and sample.labels["kind"] == "output"
    )


def test_a_killed_gateways_batches_go_on_at_the_other(
    pair: tuple[Gateway, Gateway], fake: FakeServer
) -> None:
    killed, other = pair
    fake.delay = 0.2
    cut = "stall-1 prompt"  # half of its answer comes the first time
    prompts = [cut, *(f"prompt {i}" for i in range(600))]
    batch = begin(killed.client(), upload(killed.client(), [line(each) for each in prompts]))
    client = other.client()

    def completed() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts else 0

    until(lambda: 0 < completed() < 600, "the other gateway shows the progress")
    time.sleep(1.5)  # until the text of the cut answer is in the folder
    killed.kill()
    before = len(fake.order)
    until(lambda: len(fake.order) > before + IN_FLIGHT, "the other gateway goes on")
    killed.start()
    killed.kill()
    done = ended(client, batch.id)
    assert done.status == "completed"
    check_answers(client, done.output_file_id, prompts)
    assert len(fake.order) <= len(prompts) + 3 * IN_FLIGHT
    assert fake.guesses[cut] == [[], [text_of(cut)[:HALF]]]
    assert not list((killed.folder / "running").iterdir())


def test_gateways_share_files_and_cancel_each_others_batches(
    pair: tuple[Gateway, Gateway], fake: FakeServer
) -> None:
    first, second = (each.client() for each in pair)
    fake.delay = 0.2
    file = upload(first, [line(f"prompt {i}") for i in range(5000)])
    assert second.files.content(file).text.count("\n") == 5000
    batch = begin(second, file)
    with pytest.raises(openai.ConflictError):
        first.files.delete(file)
    until(lambda: fake.order, "lines are asked")
    assert first.batches.cancel(batch.id).status == "cancelling"
    done = ended(first, batch.id)
    assert done.status == "cancelled"
    assert done.request_counts is not None
    assert done.request_counts.completed < 5000
    assert [each.id for each in first.batches.list()] == [batch.id]


def test_a_gateway_that_stood_still_writes_no_line_twice(
    pair: tuple[Gateway, Gateway], fake: FakeServer
) -> None:
    slow, other = pair
    fake.delay = 0.2
    prompts = [f"prompt {i}" for i in range(1000)]
    batch = begin(slow.client(), upload(slow.client(), [line(each) for each in prompts]))
    until(lambda: len(fake.order) > 100, "lines are asked")
    assert slow.process is not None
    slow.process.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_S + 6)  # the other gateway has the claim, and cannot have the file
    slow.process.send_signal(signal.SIGCONT)
    done = ended(other.client(), batch.id)
    assert done.status == "completed"
    check_answers(other.client(), done.output_file_id, prompts)
    assert tokens_of(other) > 0


def test_batches_go_on_when_the_database_is_back(
    pair: tuple[Gateway, Gateway], fake: FakeServer, server: Postgres
) -> None:
    first, second = pair
    fake.delay = 0.2
    prompts = [f"prompt {i}" for i in range(4000)]
    batch = begin(first.client(), upload(first.client(), [line(each) for each in prompts]))
    until(lambda: fake.order, "lines are asked")
    server.stop()
    try:
        with pytest.raises(openai.InternalServerError, match="database cannot be used"):
            second.client().batches.retrieve(batch.id)
        time.sleep(LEASE_S + 6)
        asked = len(fake.order)
        assert asked < len(prompts)
        time.sleep(1.0)
        assert len(fake.order) == asked  # another gateway could have the batch now
    finally:
        fake.delay = 0.02
        server.start()
    done = ended(second.client(), batch.id)
    assert done.status == "completed"
    check_answers(second.client(), done.output_file_id, prompts)


def test_a_gateway_that_ends_leaves_its_batches_at_once(
    pair: tuple[Gateway, Gateway], fake: FakeServer, server: Postgres
) -> None:
    import psycopg

    ending, other = pair
    prompts = [f"prompt {i}" for i in range(2000)]
    batch = begin(ending.client(), upload(ending.client(), [line(each) for each in prompts]))
    until(lambda: len(fake.order) > 100, "lines are asked")
    assert ending.process is not None
    ending.process.send_signal(signal.SIGTERM)
    ending.process.wait(60)
    alive = f"SELECT COUNT(*) FROM {SCHEMA_NAME}.gateways WHERE alive_until > 0"
    with psycopg.connect(server.url(server.names[-1])) as connection:
        ((living,),) = connection.execute(alive.encode())
    assert living == 1  # so the other one takes the batch with its next beat
    done = ended(other.client(), batch.id)
    check_answers(other.client(), done.output_file_id, prompts)
