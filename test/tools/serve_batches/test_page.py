"""The page of the service in a real browser."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from sglang_qspec.tools.show.server import POLICY
from test.tools.batch.fake_server import ACCEPTED, PASSES, FakeServer
from test.tools.batch.fakes import serving
from test.tools.serve_batches.gateway import Gateway, begin, ended, line, upload
from test.tools.show.browser import Page


@pytest.fixture(scope="module")
def fake() -> FakeServer:
    return FakeServer(delay=0.05, slots=1)


@pytest.fixture(scope="module")
def gateway(fake: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("page")
    keys = folder / "keys.toml"
    names = ("red", "blue")
    digests = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in names}
    keys.write_text("".join(f'[{name}]\nkeys = ["{digests[name]}"]\n' for name in names))
    with serving(fake) as url:
        found = Gateway(folder / "folder", "--url", url, "--keys", keys, "--in-flight", 2)
        found.start()
        try:
            yield found
        finally:
            found.kill()


def enter(page: Page, key: str) -> None:
    page.until(lambda: page.named("key").is_displayed())
    page.named("key").send_keys(key)
    page.one("#form button").click()


def cells(page: Page, id: str) -> list[str]:
    row = "return [...document.getElementById(arguments[0]).cells].map((cell) => cell.textContent)"
    found: list[str] = page.script(row, id)
    return found


def test_a_tenant_sees_and_cancels_its_own_batches_alone(page: Page, gateway: Gateway) -> None:
    red, blue = gateway.client("red-key"), gateway.client("blue-key")
    prompts = [line(f"prompt {number}") for number in range(5000)]
    runs = begin(red, upload(red, prompts), "1h")
    done = ended(red, begin(red, upload(red, prompts[:3]), "30m").id)
    bad = ended(red, begin(red, upload(red, b"<b>no line</b>\n")).id)
    other = begin(blue, upload(blue, prompts))
    page.open(gateway.url)
    enter(page, "wrong-key")
    page.until(lambda: page.text("#error") == "the key is not known")
    assert not page.one("#batches").is_displayed()
    enter(page, "red-key")
    page.until(lambda: page.text("#about") == "3 batches")
    page.until(lambda: " of 5000" in cells(page, runs.id)[3])
    assert [row.get_attribute("id") for row in page.all("tbody tr")] == [bad.id, done.id, runs.id]
    assert cells(page, done.id)[2:4] == ["completed", " 3 of 3"]
    assert cells(page, done.id)[7] == str(1 + ACCEPTED // PASSES)
    assert cells(page, bad.id)[2].startswith("failed: ")
    assert cells(page, runs.id)[2] == "in_progress"
    assert cells(page, runs.id)[4].startswith("in 59 min ")

    def progress() -> float:
        return float(page.script("return document.querySelector('tr:last-child progress').value"))

    button, value = page.one(f"#{runs.id} button"), progress()
    page.until(lambda: progress() > value)
    assert [button.is_displayed() for button in page.all("tbody button")] == [False, False, True]
    page.until(lambda: cells(page, runs.id)[6])  # its speed is measured
    button.click()  # the element has stayed, and so would its focus
    page.driver.switch_to.alert.accept()
    page.until(lambda: cells(page, runs.id)[2] == "cancelled")
    assert ended(red, runs.id).status == "cancelled"
    assert blue.batches.retrieve(other.id).status == "in_progress"
    shown = page.script("return document.documentElement.outerHTML + location.href")
    assert "red-key" not in shown
    page.one("#forget").click()
    enter(page, "blue-key")
    page.until(lambda: page.text("#about") == "1 batch")
    assert [row.get_attribute("id") for row in page.all("tbody tr")] == [other.id]
    blue.batches.cancel(other.id)
    loaded = page.script("return performance.getEntries().map((each) => each.name)")
    assert all(name.startswith(gateway.url) for name in loaded if "://" in name)
    assert all("red-key" not in name for name in loaded)
    refused = [text for text in page.complaints() if "401" not in text]
    assert refused == []


def test_the_page_allows_no_other_script_and_no_frame(gateway: Gateway) -> None:
    for path in ("/", "/batches.js", "/page.css", "/dom.js"):
        response = httpx.get(gateway.url + path)
        assert response.status_code == 200
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["Cache-Control"] == "no-store"
    assert httpx.get(gateway.url + "/other.js").status_code == 404
