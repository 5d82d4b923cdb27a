"""`qspec serve-batches` in front of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from test.engine.server.running import MAX_NEW_TOKENS, state, until
from test.tools.serve_batches.gateway import Gateway, begin, ended, line, records, upload

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0, "max_tokens": MAX_NEW_TOKENS}
CHATS = 8


@pytest.fixture
def gateway(server: Server, tmp_path: Path) -> Iterator[Gateway]:
    found = Gateway(tmp_path / "folder", "--url", server.url)
    found.start()
    try:
        yield found
    finally:
        found.kill()


def test_a_batch_whose_service_is_killed_has_the_answers_of_plain_requests(
    server: Server, expected: list[dict[str, Any]], gateway: Gateway
) -> None:
    client = gateway.client()
    file = upload(client, [line(prompt, i, **GREEDY) for i, prompt in enumerate(PROMPTS[:CHATS])])
    batch = begin(client, file)
    until(lambda: state(server)["live_requests"] > 0)
    gateway.kill()
    gateway.start()
    done = ended(client, batch.id)
    assert done.status == "completed"
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in records(client, done.output_file_id)
    }
    assert texts == {f"line-{i}": expected[i]["text"] for i in range(CHATS)}
    assert done.usage is not None
    assert 0 < done.usage.output_tokens <= CHATS * MAX_NEW_TOKENS
    figures = (done.model_extra or {})["qspec"]
    assert figures["passes"] > 0
    until(lambda: state(server)["live_requests"] == 0)


def test_a_batch_of_responses_has_the_answers_of_chats(
    expected: list[dict[str, Any]], gateway: Gateway
) -> None:
    client = gateway.client()
    limits = {"temperature": 0, "max_output_tokens": MAX_NEW_TOKENS}
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"input": prompt, **limits},
        }
        for number, prompt in enumerate(PROMPTS[:CHATS])
    ]
    done = ended(client, begin(client, upload(client, lines), endpoint="/v1/responses").id)
    assert done.status == "completed"
    found = {
        each["custom_id"]: Response.model_validate(each["response"]["body"])
        for each in records(client, done.output_file_id)
    }
    assert len(found) == CHATS
    for i in range(CHATS):  # SGLang gives a response fewer tokens than a chat
        text = found[f"line-{i}"].output_text
        assert text
        assert expected[i]["text"].startswith(text)
    assert done.usage is not None
    used = [response.usage for response in found.values()]
    assert done.usage.output_tokens == sum(each.output_tokens for each in used if each)
    assert done.usage.output_tokens > 0


def test_a_cancelled_batch_leaves_the_server(server: Server, gateway: Gateway) -> None:
    client = gateway.client()
    endless = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
    batch = begin(client, upload(client, [line(f"Count to {i}.", i, **endless) for i in range(8)]))
    until(lambda: state(server)["live_requests"] == 8)
    client.batches.cancel(batch.id)
    assert ended(client, batch.id).status == "cancelled"
    until(lambda: state(server)["live_requests"] == 0)
