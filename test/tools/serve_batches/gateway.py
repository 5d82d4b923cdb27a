"""The service as a process in front of fake servers, and OpenAI's own client for it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import openai
from openai.types import Batch

from sglang_qspec.tools.ports import free_port
from test.tools.batch.fakes import ROOT, wait_for

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
LIMIT_S = 300.0
"""Only a broken build waits this long."""


class Gateway:
    """A service in a process of its own, which can be killed and started again."""

    def __init__(self, folder: Path, *options: object) -> None:
        port = free_port()
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.command = [
            *(sys.executable, "-m", "sglang_qspec", "serve-batches"),
            *("--folder", str(folder), "--port", str(port), *map(str, options)),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it is connected to a server."""
        self.launch()
        wait_for(self.url)

    def launch(self) -> None:
        """Start the process, and wait until it listens."""
        with (self.folder.parent / "service.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, cwd=ROOT)

        def listens() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health").status_code in (200, 503)
            return False

        until(listens, "the service listens")

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self, key: str = "any") -> openai.OpenAI:
        """OpenAI's client for the service."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any, key: str = "any") -> httpx.Response:
        """POST something else than the client would."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, content=data, headers=headers, timeout=60)


def line(prompt: str, number: int | None = None, **more: Any) -> dict[str, Any]:
    """A line of a chat; its custom_id is the prompt, or the number."""
    body = {"messages": [{"role": "user", "content": prompt}], **more}
    custom_id = prompt if number is None else f"line-{number}"
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def upload(client: openai.OpenAI, lines: Sequence[dict[str, Any]] | IO[bytes] | bytes) -> str:
    """Upload lines; returns the id of the file."""
    if not isinstance(lines, (bytes, bytearray)) and isinstance(lines, Sequence):
        lines = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return client.files.create(file=("requests.jsonl", lines), purpose="batch").id


def begin(
    client: openai.OpenAI, file: str, window: str = "24h", endpoint: str = CHAT, **more: Any
) -> Batch:
    """Create a batch."""
    given: Any = {"completion_window": window, "endpoint": endpoint, **more}
    return client.batches.create(input_file_id=file, **given)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def ended(client: openai.OpenAI, id: str) -> Batch:
    """The batch in its final state."""
    until(lambda: client.batches.retrieve(id).status in FINAL, "the batch ends")
    return client.batches.retrieve(id)


def records(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    """The records of a file of answers or failures."""
    assert file is not None
    return [json.loads(text) for text in client.files.content(file).text.splitlines()]
