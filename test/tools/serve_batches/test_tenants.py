"""Keys, limits, and what tenants see of each other."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.serve_batches.command import run
from sglang_qspec.tools.serve_batches.objects import ApiError
from sglang_qspec.tools.serve_batches.tenants import EVERYONE, Tenants, read
from test.tools.batch.fake_server import FakeServer
from test.tools.batch.fakes import serving
from test.tools.serve_batches.gateway import Gateway, begin, ended, line, until, upload


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


Heard = tuple[bytes, dict[str, str]]
"""Body and headers of a message."""
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
KEYS = f"""
[red]
keys = ["{digest("red-1")}", "{digest("red-2")}"]

[blue]
keys = ["{digest("blue-1").upper()}"]
files = 3
file_bytes = 1000
lines = 4
batches = 2
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


@pytest.fixture
def gateway(keys: Path, tmp_path: Path) -> Iterator[Gateway]:
    with serving(FakeServer(delay=0.05, slots=1)) as url:
        options = ("--url", url, "--keys", keys, "--in-flight", 2)
        found = Gateway(tmp_path / "folder", *options)
        found.start()
        try:
            yield found
        finally:
            found.kill()


def test_a_key_names_its_tenant(keys: Path) -> None:
    tenants = read(keys)
    assert [tenants.of(f"Bearer {key}").name for key in ("red-1", "red-2", "blue-1")] == [
        *("red", "red", "blue")
    ]
    assert tenants.of("bearer red-1").files == EVERYONE.files
    assert tenants.named("blue").lines == 4
    assert tenants.named("gone") == EVERYONE
    for wrong in (None, "", "Bearer ", "Bearer red", "Basic red-1", f"Bearer {digest('red-1')}"):
        with pytest.raises(ApiError) as caught:
            tenants.of(wrong)
        assert caught.value.status == 401
    assert Tenants().of(None) == EVERYONE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no tenant"),
        ("[a", "is no TOML"),
        ("a = 1", "must be a table"),
        ("[a]\nfiles = 1", "keys is None"),
        ("[a]\nkeys = ['secret']", "SHA-256"),
        (f"[a]\nkeys = ['{'g' * 64}']", "SHA-256"),
        (f"[a]\nkeys = ['{'a' * 64}']\nsize = 1", "size is unknown"),
        (f"[a]\nkeys = ['{'a' * 64}']\nfiles = 0", "files is 0"),
        (f"[a]\nkeys = ['{'a' * 64}']\nfiles = true", "files is True"),
        (f"[a]\nkeys = ['{'a' * 64}']\n[b]\nkeys = ['{'A' * 64}']", "key of another tenant"),
        (f"[a]\nkeys = ['{'a' * 64}']\nwebhook = 'https://a'", "must both be texts"),
        (
            f"[a]\nkeys = ['{'a' * 64}']\nwebhook = 'ftp://a'\nwebhook_secret = 'whsec_'",
            "webhook is 'ftp://a'",
        ),
    ],
)
def test_a_wrong_file_of_keys_is_refused(keys: Path, text: str, message: str) -> None:
    keys.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(keys)


def test_a_service_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    from sglang_qspec.__main__ import _parse

    for host in ("0.0.0.0", "::", "example.com"):
        options = _parse(["serve-batches", "--folder", str(tmp_path / "new"), "--host", host])
        with pytest.raises(ConfigError, match="needs --keys"):
            run(options)
    assert not (tmp_path / "new").exists()


def test_tenants_do_not_see_each_other(gateway: Gateway) -> None:
    red, blue = gateway.client("red-1"), gateway.client("blue-1")
    with pytest.raises(openai.AuthenticationError, match="not known"):
        gateway.client("green").files.list()
    file = upload(red, [line(f"prompt {i}") for i in range(200)])
    batch = begin(red, file)
    assert gateway.client("red-2").files.retrieve(file).id == file
    assert not blue.files.list().data
    assert not blue.batches.list().data
    for ask in (blue.files.retrieve, blue.files.content, blue.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file)
    for look in (blue.batches.retrieve, blue.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            look(batch.id)
    with pytest.raises(openai.BadRequestError, match="no file of purpose"):
        begin(blue, file)
    red.batches.cancel(batch.id)
    assert ended(red, batch.id).status == "cancelled"


def test_limits_are_those_of_the_tenant(gateway: Gateway) -> None:
    client = gateway.client("blue-1")
    with pytest.raises(openai.APIStatusError, match="at most 1000 are allowed") as large:
        upload(client, b"x" * 1001)
    assert large.value.status_code == 413
    files = [upload(client, [line("a"), line("b")]) for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="delete some"):
        upload(client, [line("x")])
    client.files.delete(files.pop())
    many = upload(client, [line(f"{i}", max_tokens=1) for i in range(5)])
    failed = ended(client, begin(client, many).id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert "at most 4 are allowed" in (failed.errors.data[0].message or "")


def test_a_tenant_with_much_work_leaves_half_of_the_servers_to_another(gateway: Gateway) -> None:
    red, blue = gateway.client("red-1"), gateway.client("blue-1")
    much = begin(red, upload(red, [line(f"red {i}") for i in range(1000)]))
    time.sleep(0.5)
    little = begin(blue, upload(blue, [line(f"blue {i}") for i in range(4)]))
    assert ended(blue, little.id).status == "completed"
    assert red.batches.retrieve(much.id).status == "in_progress"
    red.batches.cancel(much.id)
    ended(red, much.id)


def test_the_webhook_of_a_tenant_hears_of_its_batches(tmp_path: Path) -> None:
    with heard() as (hook, messages), serving(FakeServer()) as url:
        gateway = hooked(tmp_path, url, hook)
        gateway.start()
        try:
            client = gateway.client("red-1")
            done = ended(client, begin(client, upload(client, [line("one")])).id)
            failed = ended(client, begin(client, upload(client, b"none")).id)
            until(lambda: len(messages) == 2, "both messages come")
        finally:
            gateway.kill()
    events = [client.webhooks.unwrap(body, headers, secret=SECRET) for body, headers in messages]
    assert {(event.type, event.data.id) for event in events} == {  # type: ignore[union-attr]
        ("batch.completed", done.id),
        ("batch.failed", failed.id),
    }


def test_a_message_that_was_not_taken_is_sent_after_a_kill_until_it_is(tmp_path: Path) -> None:
    status = [503]
    with serving(FakeServer()) as url, heard(status) as (hook, messages):
        gateway = hooked(tmp_path, url, hook)
        gateway.start()
        try:
            client = gateway.client("red-1")
            ended(client, begin(client, upload(client, [line("one")])).id)
            until(lambda: messages, "the message comes")
            gateway.kill()
            before, status[0] = len(messages), 200
            for _ in range(2):  # the second service has nothing to send
                gateway.start()
                until(lambda: len(messages) > before, "the message comes again")
                time.sleep(1.0)
                gateway.kill()
        finally:
            gateway.kill()
    assert len(messages) == before + 1
    assert len({headers["webhook-id"] for _, headers in messages}) == 1


def hooked(folder: Path, url: str, hook: str) -> Gateway:
    """A service that tells the tenant's webhook of the end of batches."""
    keys = folder / "keys.toml"
    keys.write_text(
        f'[red]\nkeys = ["{digest("red-1")}"]\nwebhook = "{hook}"\nwebhook_secret = "{SECRET}"\n'
    )
    return Gateway(folder / "folder", "--url", url, "--keys", keys, "--private-webhooks")


@contextmanager
def heard(
    status: Sequence[int] = (200,),
) -> Iterator[tuple[str, list[tuple[bytes, dict[str, str]]]]]:
    """The URL of a server that answers with a status, and the bodies and headers that it got."""
    found = list[Heard]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.append((body, dict(self.headers)))
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", found
        server.shutdown()
