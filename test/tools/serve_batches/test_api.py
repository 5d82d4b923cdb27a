"""Files and batches through OpenAI's own client."""

from __future__ import annotations

import io
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_qspec.tools.serve_batches.job import RETRY_S
from test.tools.batch.fake_server import ACCEPTED, TOKENS, FakeServer, text_of
from test.tools.batch.fakes import FakeProcess, serving
from test.tools.serve_batches.gateway import (
    PLAIN,
    Gateway,
    begin,
    ended,
    line,
    records,
    until,
    upload,
)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:1"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Origin": "https://other.example"}, 403),
    ],
)
def test_a_page_of_another_site_gets_nothing_without_keys(
    gateway: Gateway, headers: dict[str, str], status: int
) -> None:
    assert httpx.get(f"{gateway.url}/v1/batches", headers=headers).status_code == status


def test_a_batch_is_answered(client: openai.OpenAI) -> None:
    lines = [line(f"prompt {i}", max_tokens=4) for i in range(50)]
    batch = begin(client, upload(client, lines), metadata={"night": "run"})
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert (batch.metadata, batch.errors, batch.error_file_id) == ({"night": "run"}, None, None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (50, 50, 0)
    assert batch.usage is not None
    assert (batch.usage.output_tokens, batch.usage.total_tokens) == (50 * TOKENS, 50 * TOKENS + 50)
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    found_at = [at for at in times if at is not None]
    assert len(found_at) == len(times)
    assert found_at == sorted(found_at)
    assert batch.expires_at == batch.created_at + 24 * 3600
    found = records(client, batch.output_file_id)
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in found
    }
    assert len(found) == 50
    assert texts == {f"prompt {i}": text_of(f"prompt {i}") for i in range(50)}
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(output.id).content)


def test_failed_lines_are_in_a_file_of_their_own(client: openai.OpenAI) -> None:
    lines = [line("fine"), line("status-400 refused")]
    batch = ended(client, begin(client, upload(client, lines)).id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (1, 1)
    [failed] = records(client, batch.error_file_id)
    assert failed["custom_id"] == "status-400 refused"
    assert failed["response"]["status_code"] == 400
    assert len(records(client, batch.output_file_id)) == 1


@pytest.mark.parametrize(
    ("text", "number", "message"),
    [
        (b'{"custom_id": "a"\n', 1, "is not JSON"),
        (json.dumps(line("x", stream=True)).encode(), 1, "stream is True"),
        (
            b"".join(json.dumps(line("same")).encode() + b"\n" for _ in range(2)),
            2,
            "that of an earlier line",
        ),
        (json.dumps({**line("x"), "url": PLAIN, "body": {"prompt": "x"}}).encode(), 1, "url is"),
        (b"", None, "has no line"),
    ],
)
def test_a_bad_input_fails_with_its_lines(
    client: openai.OpenAI, text: bytes, number: int | None, message: str
) -> None:
    batch = ended(client, begin(client, upload(client, text)).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert error.line == number
    assert message in (error.message or "")
    assert batch.output_file_id is None


def test_lists_have_pages(client: openai.OpenAI) -> None:
    ids = [upload(client, [line(f"page {i}")]) for i in range(5)]
    newest = [file.id for file in client.files.list(purpose="batch", limit=2)]
    assert newest[:5] == ids[::-1]  # the client asks for all pages
    oldest = client.files.list(order="asc", after=ids[1], limit=2)
    assert [file.id for file in oldest.data] == ids[2:4]
    assert oldest.has_more
    batches = [begin(client, id).id for id in ids]
    assert [batch.id for batch in client.batches.list(limit=2)][:5] == batches[::-1]
    page = client.batches.list(limit=1)
    assert [batch.id for batch in page.data] == batches[4:]
    assert page.has_next_page()
    for id in batches:
        ended(client, id)


def test_files_are_deleted_and_content_is_whole(client: openai.OpenAI, gateway: Gateway) -> None:
    content = "".join(json.dumps(line(f"中文 {i}", i)) + "\n" for i in range(20_000)).encode()
    id = upload(client, io.BytesIO(content))
    assert client.files.content(id).content == content
    assert client.files.retrieve(id).bytes == len(content)
    assert client.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError, match="no such File object"):
        client.files.retrieve(id)
    assert not (gateway.folder / "files" / id).exists()


def test_unknown_things_are_errors_of_the_api(client: openai.OpenAI, gateway: Gateway) -> None:
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask("file-0")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    with pytest.raises(openai.BadRequestError, match="no file of purpose 'batch'"):
        begin(client, "file-0")
    found = httpx.get(f"{gateway.url}/v1/unknown")
    assert found.status_code == 404
    assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input_file_id": 3}, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after[seconds]",
        ),
        (
            {"output_expires_after": {"anchor": "now", "seconds": 3600}},
            "output_expires_after[anchor]",
        ),
    ],
)
def test_a_wrong_field_is_named(
    client: openai.OpenAI, gateway: Gateway, change: dict[str, object], param: str
) -> None:
    body = {
        "input_file_id": upload(client, [line("x")]),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    found = gateway.post("/v1/batches", {**body, **change})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"[", b"[]", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(gateway: Gateway, body: bytes) -> None:
    assert gateway.post("/v1/batches", body).status_code == 400


def test_an_upload_needs_a_file_and_a_purpose(client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose is 'assistants'"):
        client.files.create(file=b"{}", purpose="assistants")
    found = httpx.post(f"{gateway.url}/v1/files", data={"purpose": "batch"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "file"
    expires: Any = {"anchor": "created_at", "seconds": 5}
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.files.create(file=b"{}", purpose="batch", expires_after=expires)


def test_an_upload_that_breaks_leaves_nothing(client: openai.OpenAI, gateway: Gateway) -> None:
    before = [file.id for file in client.files.list()]
    address = urlsplit(gateway.url)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{"custom'
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode())
    assert upload(client, [line("later")])
    after = [file.id for file in client.files.list()]
    assert after[1:] == before
    assert not list((gateway.folder / "incoming").iterdir())
    assert len(list((gateway.folder / "files").iterdir())) == len(after)


def test_a_file_that_a_batch_reads_is_kept(tmp_path: Path) -> None:
    with serving(FakeServer(delay=0.1, slots=1)) as url:
        gateway = Gateway(tmp_path / "folder", "--url", url, "--in-flight", 1)
        gateway.start()
        try:
            client = gateway.client()
            file = upload(client, [line(f"prompt {i}") for i in range(1000)])
            batch = begin(client, file)
            with pytest.raises(openai.ConflictError, match="still reads"):
                client.files.delete(file)
            client.batches.cancel(batch.id)
            assert ended(client, batch.id).status == "cancelled"
            assert client.files.delete(file).deleted
        finally:
            gateway.kill()


def test_health_and_log_name_what_is_wrong(tmp_path: Path) -> None:
    process = FakeProcess("--slots", "4")
    gateway = Gateway(tmp_path / "folder", "--url", process.url)
    gateway.launch()
    try:

        def health() -> httpx.Response:
            return httpx.get(f"{gateway.url}/health")

        until(lambda: "no server answers" in health().text, "it names the reason")
        assert health().status_code == 503
        time.sleep(1.5 * RETRY_S)
        process.start()
        until(lambda: health().status_code == 200, "it is connected")
        logged = (tmp_path / "service.log").read_text()
        assert (logged.count("no server answers"), logged.count("a server answers")) == (1, 1)
    finally:
        gateway.kill()
        process.kill()


def test_prometheus_reads_the_figures(client: openai.OpenAI, gateway: Gateway) -> None:
    def series() -> dict[tuple[str, ...], float]:
        text = httpx.get(f"{gateway.url}/metrics").text
        return {
            (sample.name.removeprefix("qspec_batches_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = series()
    assert before["connected",] == 1.0
    lines = [line("one"), line("two"), line("status-400 three")]
    ended(client, begin(client, upload(client, lines)).id)
    now = series()
    more = {name: now[name] - before.get(name, 0.0) for name in now}
    assert more["lines_total", "answered"] == 2
    assert more["lines_total", "failed"] == 1
    assert more["tokens_total", "output"] == 2 * TOKENS
    assert more["tokens_total", "drafted"] == 2 * ACCEPTED
    assert more["ended_total", "completed"] == 1
