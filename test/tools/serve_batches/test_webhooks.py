"""Messages about batches that have ended: signed, repeated, and never to private addresses."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.serve_batches import webhooks
from sglang_qspec.tools.serve_batches.objects import Batch, BatchStatus, encoded, event_of
from sglang_qspec.tools.serve_batches.store import Message
from sglang_qspec.tools.serve_batches.webhooks import Webhook, Webhooks

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
BATCH = Batch(
    id="batch_1",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=2,
    status=BatchStatus.COMPLETED,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "PAUSES_S", (0.001, 0.001))


@asynccontextmanager
async def receiver(*statuses: int) -> AsyncIterator[tuple[str, list[tuple[bytes, Any]]]]:
    """The URL of a server that answers with these statuses, and the messages that it got."""
    found = list[tuple[bytes, Any]]()
    left = list(statuses)

    async def take(request: web.Request) -> web.Response:
        found.append((await request.read(), request.headers.copy()))
        return web.Response(status=left.pop(0) if left else 200)

    app = web.Application()
    app.add_routes([web.post("/hook", take)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/hook", found
    finally:
        await runner.cleanup()


def message(tried: int = 0) -> Message:
    event = event_of(BATCH)
    return Message(event.id, "red", BATCH.id, encoded(event), tried)


def sent(
    *statuses: int, private: bool = True, host: str = "127.0.0.1", tried: int = 0
) -> list[tuple[bytes, Any]]:
    """What a receiver gets that answers with these statuses, and then takes everything."""
    attempts = list[str]()

    async def failed(id: str) -> None:
        attempts.append(id)

    async def run() -> list[tuple[bytes, Any]]:
        async with receiver(*statuses) as (url, found):
            hook = Webhook(url.replace("127.0.0.1", host), SECRET)
            note = message(tried)
            await Webhooks(private=private).send(hook, note, failed)
            assert set(attempts) <= {note.id}
            return found

    return asyncio.run(run())


def test_openais_client_checks_and_reads_the_message() -> None:
    [(body, headers)] = sent()
    client = openai.OpenAI(api_key="x")
    event = client.webhooks.unwrap(body.decode(), headers, secret=SECRET)
    assert event.type == "batch.completed"
    assert event.data.id == "batch_1"
    other = "whsec_" + base64.b64encode(b"t" * 32).decode()
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.decode(), headers, secret=other)


def test_a_message_is_sent_again_with_its_id_until_it_is_taken() -> None:
    found = sent(500, 302)
    assert len(found) == 3
    assert len({headers["webhook-id"] for _, headers in found}) == 1
    assert len(sent(500, 500, 500, 500)) == 3
    assert len(sent(500, 500, tried=1)) == 2  # one attempt was before a kill


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_private_addresses_get_nothing_unless_they_are_allowed(host: str) -> None:
    assert not sent(private=False, host=host)
    assert sent(private=True, host=host)


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ],
)
def test_a_name_of_a_private_address_has_no_address(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def resolve(*_: object, **__: object) -> list[Any]:
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, 80, *((0, 0) if ":" in address else ())))
        ]

    async def run() -> str | None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", _async(resolve))
        hook = Webhook("http://inner.example/hook", SECRET)
        return await Webhooks()._attempt(hook, "evt_1", b"{}")

    assert "no public address" in (asyncio.run(run()) or "")


def _async(call: Any) -> Any:
    async def run(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    return run


@pytest.mark.parametrize("url", ["", "example.com/x", "ftp://a/b", "https://", "https://u:p@a/b"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="webhook is"):
        Webhook(url, SECRET)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_YWJj", SECRET[6:], "whsec_!" + "a" * 40])
def test_a_secret_that_is_short_or_no_base64_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError, match="webhook_secret"):
        Webhook("https://a/b", secret)
