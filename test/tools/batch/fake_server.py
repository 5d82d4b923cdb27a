"""A server that answers at once, for measurements and tests of the client alone.

    python -m test.tools.batch.fake_server --port 30000

It has the endpoints that `qspec batch` uses. An answer depends only on the prompt. Words in a
prompt ask for faults: `status-500` answers with that status, `flaky-2` fails the first two times,
`abort` ends with the finish reason `abort`, `crash` ends the process, `hang` does not answer, and
`stall-2` sends half of a streamed answer the first two times, and then nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

TOKENS = 4
"""Number of output tokens of each answer."""
HALF = 12
"""Characters of the first piece of a streamed answer."""
MAX_GUESS_TOKENS = 1000
"""Length of the guesses of a request; each character is a token."""
PASSES, ACCEPTED = 2, 2
"""Figures of the passes of each answer."""


class FakeServer:
    """The handlers of one server."""

    def __init__(self, *, delay: float = 0.0, slots: int = 2, remembers: bool = True) -> None:
        """An answer takes `delay` seconds, and `/server_info` names `slots`.

        A server that does not remember its prompts needs little memory for a million of them.
        """
        self.delay = delay
        self._remembers = remembers
        self._info = {
            "model_path": "fake",
            "max_running_requests": slots,
            "weight_version": "default",
            "internal_states": [
                {
                    "effective_max_running_requests_per_dp": slots,
                    "qspec": {
                        "sidecar": "ready",
                        "guess_limits": {"guesses": 64, "tokens": MAX_GUESS_TOKENS},
                    },
                }
            ],
        }
        self.asked: Counter[str] = Counter()
        """Number of requests with each prompt."""
        self.guesses: dict[str, list[list[str]]] = {}
        """The guesses of each request, by prompt."""
        self.order: list[str] = []
        """The prompts in the order of their requests."""
        self.most = 0
        """Largest number of requests at once."""
        self.on_info: Callable[[], object] = lambda: None
        """Called when a client asks for the server's figures, which it does before it sends lines.
        """
        self.others = 0
        """Number of requests of other clients that `/v1/loads` counts too."""
        self.now = 0
        """Number of requests that it has."""

    def app(self) -> web.Application:
        """The application that serves the endpoints."""
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/server_info", self._server_info),
                web.get("/health", self._health),
                web.get("/v1/loads", self._loads),
                web.post("/v1/completions", self._answer),
                web.post("/v1/chat/completions", self._answer),
            ]
        )
        return app

    async def _server_info(self, request: web.Request) -> web.Response:
        self.on_info()
        return web.json_response(self._info)

    async def _loads(self, request: web.Request) -> web.Response:
        slots = self._info["max_running_requests"]
        load = {"num_running_reqs": self.now, "num_waiting_reqs": self.others}
        return web.json_response({"loads": [{**load, "max_running_requests": slots}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = prompt_of(body)
        guesses = (body.get("custom_params") or {}).get("qspec_guesses", [])
        if self._remembers:
            self.asked[prompt] += 1
            self.order.append(prompt)
            self.guesses.setdefault(prompt, []).append(guesses)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
            if faulty := await self._faulty(prompt, guesses):
                return faulty
            if body.get("stream"):
                return await self._stream(request, body, prompt)
            return web.json_response(answer(body))
        finally:
            self.now -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompt: str
    ) -> web.StreamResponse:
        """Send the answer in two pieces."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, *others = pieces(answer(body))
        await response.write(first)
        stall = re.search(r"stall-(\d+)", prompt)
        if stall and self.asked[prompt] <= int(stall[1]):
            await asyncio.sleep(3600)
        for piece in others:
            await response.write(piece)
        return response

    async def _faulty(self, prompt: str, guesses: list[str]) -> web.Response | None:
        if "crash" in prompt:
            os._exit(1)
        if "hang" in prompt:
            await asyncio.sleep(3600)
        if sum(map(len, guesses)) > MAX_GUESS_TOKENS:
            return web.json_response({"message": "the guesses are too long"}, status=400)
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
        "metadata": {
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": TOKENS}],
        },
    }
    if body.get("return_spec_tokens_details"):
        figures = {"spec_verify_ct": PASSES, "spec_num_correct_drafts": ACCEPTED}
        found["sglext"] = {"spec_tokens_details": figures}
    return found


def pieces(whole: dict[str, Any]) -> list[bytes]:
    """An answer as SGLang streams it."""
    (choice,) = whole.pop("choices")
    del whole["metadata"]
    common = {key: whole.pop(key) for key in ("id", "model")}
    message = choice.pop("message", None)
    text = message["content"] if message else choice.pop("text")
    found: list[dict[str, Any]] = []
    for part in (text[:HALF], text[HALF:]):
        form = {"delta": {"content": part}} if message else {"text": part}
        found.append({**common, "choices": [{**form, "index": 0, "finish_reason": None}]})
    found[0]["usage"] = {"completion_tokens": HALF}
    found[-1]["choices"][0] |= choice
    extension = whole.pop("sglext", None)
    if extension is not None:
        found.append({**common, "choices": [], "sglext": extension})
    found.append({**common, "choices": [], **whole})
    return [b"data: %s\n\n" % json.dumps(each).encode() for each in found] + [b"data: [DONE]\n\n"]


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
