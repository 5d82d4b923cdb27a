"""The two loads of `bench_batches`: short requests of people, and a batch of OpenAI's client."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness.server import Server
from sglang_qspec.tools.local_server import LocalServer

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
KEY = "any"
"""A service without keys takes each key."""
START_S, POLL_S = 60.0, 0.1


class Service(LocalServer):
    """`qspec serve-batches` in front of a server, and OpenAI's client for it."""

    def __init__(self, url: str, folder: Path) -> None:
        """`folder` is the service's own."""
        super().__init__(
            ["--url", url, "--folder", str(folder)],
            os.environ,
            folder.with_suffix(".log"),
            launcher=("-m", "sglang_qspec", "serve-batches"),
        )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY)

    def start(self) -> None:
        """Start it, and wait until it listens. Raises RuntimeError."""
        self.launch()
        while True:
            try:
                self.client.batches.list()
            except openai.APIConnectionError:
                if self.exit_code() is not None or self.age > START_S:
                    raise RuntimeError(f"the service {self.obituary()}") from None
                time.sleep(POLL_S)
            else:
                return

    def begin(self, prompts: Sequence[str], max_tokens: int) -> str:
        """Begin a batch of greedy chats; returns its id."""
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": CHAT,
                "body": chat(text, max_tokens),
            }
            for number, text in enumerate(prompts)
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.client.files.create(file=("lines.jsonl", data), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        ).id

    def cancel(self, batch: str) -> None:
        """Cancel a batch, and wait for its end."""
        self.client.batches.cancel(batch)
        while self.client.batches.retrieve(batch).status != "cancelled":
            time.sleep(POLL_S)

    def tokens(self) -> float:
        """Output tokens of all answers since the start."""
        text = self.client.with_options(base_url=self.url).get("/metrics", cast_to=str)
        samples = (
            each for family in text_string_to_metric_families(text) for each in family.samples
        )
        return sum(
            each.value
            for each in samples
            if each.name == "qspec_batches_tokens_total" and each.labels["kind"] == "output"
        )


def chat(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy chat."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": "default", "messages": messages, "temperature": 0, "max_tokens": max_tokens}


def first_token_times(
    server: Server, prompts: Sequence[str], arrivals: Sequence[float], max_tokens: int
) -> list[float]:
    """Seconds from each arrival to the first token of its answer; returns after all answers.

    `arrivals` are seconds from now. Raises ServerError and OSError.
    """
    began = time.monotonic()

    def ask(prompt: str, after: float) -> float:
        time.sleep(max(0.0, began + after - time.monotonic()))
        found = None
        for piece in server.stream(CHAT, {**chat(prompt, max_tokens), "stream": True}):
            if found is None and piece["choices"][0]["delta"].get("content"):
                found = time.monotonic() - began - after
        if found is None:
            raise RuntimeError(f"the answer to {prompt!r} has no text")
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts, arrivals))
