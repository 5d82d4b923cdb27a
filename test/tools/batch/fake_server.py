"""A server that answers at once, for measurements and tests of the client alone.

    python -m test.tools.batch.fake_server --port 30000

It has the endpoints that `qspec batch` uses. An answer depends only on the prompt. Words in a
prompt ask for faults: `status-500` answers with that status, `flaky-2` fails the first two times,
`abort` ends with the finish reason `abort`, `crash` ends the process, `hang` does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

TOKENS = 4
"""Number of output tokens of each answer."""
PASSES, ACCEPTED = 2, 2
"""Figures of the passes of each answer."""


class FakeServer:
    """The handlers of one server."""

    def __init__(self, *, delay: float = 0.0, slots: int = 2, remembers: bool = True) -> None:
        """An answer takes `delay` seconds, and `/server_info` names `slots`.

        A server that does not remember its prompts needs little memory for a million of them.
        """
        self._delay = delay
        self._remembers = remembers
        self._info = {
            "model_path": "fake",
            "max_running_requests": slots,
            "internal_states": [
                {"effective_max_running_requests_per_dp": slots, "qspec": {"sidecar": "ready"}}
            ],
        }
        self.asked: Counter[str] = Counter()
        """Number of requests with each prompt."""
        self.order: list[str] = []
        """The prompts in the order of their requests."""
        self.most = 0
        """Largest number of requests at once."""
        self.on_info: Callable[[], object] = lambda: None
        """Called when a client asks for the server's figures, which it does before it sends lines.
        """
        self._now = 0

    def app(self) -> web.Application:
        """The application that serves the endpoints."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/server_info", self._server_info),
                web.get("/health", self._health),
                web.post("/v1/completions", self._answer),
                web.post("/v1/chat/completions", self._answer),
            ]
        )
        return app

    async def _server_info(self, request: web.Request) -> web.Response:
        self.on_info()
        return web.json_response(self._info)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = prompt_of(body)
        if self._remembers:
            self.asked[prompt] += 1
            self.order.append(prompt)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if self._delay:
                await asyncio.sleep(self._delay)
            return await self._faulty(prompt) or web.json_response(answer(body))
        finally:
            self._now -= 1

    async def _faulty(self, prompt: str) -> web.Response | None:
        if "crash" in prompt:
            os._exit(1)
        if "hang" in prompt:
            await asyncio.sleep(3600)
        status = re.search(r"status-(\d+)", prompt)
        flaky = re.search(r"flaky-(\d+)", prompt)
        if status or (flaky and self.asked[prompt] <= int(flaky[1])):
            found = {"message": "as the prompt asks"}
            return web.json_response(found, status=int(status[1]) if status else 500)
        return None


def prompt_of(body: dict[str, Any]) -> str:
    """The prompt of a request, as a text."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def text_of(prompt: str) -> str:
    """The answer to a prompt."""
    return "answer " + hashlib.sha256(prompt.encode()).hexdigest()[:16]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request."""
    prompt = prompt_of(body)
    reason = "abort" if "abort" in prompt else "stop"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": text_of(prompt)}
    else:
        choice["text"] = text_of(prompt)
    found = {
        "id": "fake-1",
        "model": body.get("model", "default"),
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1},
    }
    if body.get("return_spec_tokens_details"):
        figures = {"spec_verify_ct": PASSES, "spec_num_correct_drafts": ACCEPTED}
        found["sglext"] = {"spec_tokens_details": figures}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, metavar="S")
    parser.add_argument("--slots", type=int, default=2, metavar="N")
    parser.add_argument("--forget", action="store_true", help="do not remember the prompts")
    options = parser.parse_args()
    fake = FakeServer(delay=options.delay, slots=options.slots, remembers=not options.forget)
    web.run_app(fake.app(), host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
