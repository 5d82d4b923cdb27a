"""Debian's chromium, driven by selenium."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.guesses.earlier import EarlierAnswers
from sglang_qspec.tools.show.server import ShowServer

FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
SECONDS = 60
"""Limit of each wait. Only a broken page reaches it."""


@contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """A browser with a fresh profile in `folder`; skips the test if there is no browser."""
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("there is no chromium (on Debian: apt install chromium chromium-driver)")
    options = ChromeOptions()
    options.binary_location = paths[0]
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(folder / "downloads")}
    )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(paths[1]))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def shown(
    url: str, prompts: Sequence[str] = (), earlier: EarlierAnswers | None = None
) -> Iterator[ShowServer]:
    """`qspec show` for the server at `url`."""
    with ShowServer("127.0.0.1", 0, Client(url), prompts, earlier) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


class Page:
    """The page in a browser, in the words of a user."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1200, height: int = 900) -> Page:
        """Load the page in a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser")
        self.driver.get(url)
        return self

    def ask(self, prompt: str, *, compare: bool = False, finished: bool = True) -> None:
        """Send a prompt, and wait for the end of the answer if it is to be `finished`."""
        field = self.named("prompt")
        field.clear()
        field.click()
        # `send_keys` refuses characters beyond the basic multilingual plane, such as emoji.
        self.driver.execute_cdp_cmd("Input.insertText", {"text": prompt})
        if compare != self.named("compare").is_selected():
            self.named("compare").click()
        self.named("send").click()
        if finished:
            self.until(self.is_idle)

    def is_idle(self) -> bool:
        return bool(self.named("send").is_enabled())

    def named(self, name: str) -> Any:
        return self.driver.find_element(By.NAME, name)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def text(self, selector: str) -> str:
        """The text of an element as the document has it, with all of its white space."""
        return str(self.script("return document.querySelector(arguments[0]).textContent", selector))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def focused(self) -> str:
        """The index of the token that has the focus."""
        return str(self.script("return document.activeElement.dataset.index"))

    def tokens(self) -> list[tuple[str, str]]:
        """The tokens of the answer: text and source."""
        found = self.script(
            "return [...document.querySelectorAll('.token[data-index]')].map("
            "(span) => [span.textContent, span.classList[1]])"
        )
        return [(text, source) for text, source in found]

    def point_at(self, element: Any) -> None:
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        chain = ActionChains(self.driver)
        chain.w3c_actions.pointer_action.move_to_location(1, 1)
        chain.move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def until(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, SECONDS, poll_frequency=0.05).until(lambda _: condition())

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the page was opened."""
        return [json.dumps(entry) for entry in self.driver.get_log("browser")]
