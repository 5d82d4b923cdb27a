"""A server on this machine that the batch starts, restarts and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from sglang_qspec import config
from sglang_qspec.errors import BatchError, ServerLostError
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.runner import ATTEMPTS
from sglang_qspec.tools.batch.server import Note, Reply
from sglang_qspec.tools.complete.http import Http
from sglang_qspec.tools.guesses.guess import Guess
from sglang_qspec.tools.local_server import LocalServer

logger = logging.getLogger(__name__)

POLL_S = 0.5
STREAM_TOKENS = 16
"""Tokens of a piece of a streamed answer, because each piece takes time of the server."""
DEATHS = ATTEMPTS + 1
"""Number of ends of the server in a row, without an answer between them, that stop the batch.
Before that, a line that ends the server each time has failed."""


def launch_settings(
    model: str | None, draft_model: str | None, *, on_cuda: bool
) -> tuple[list[str], dict[str, str]]:
    """The flags and the environment of a server for these models; None stands for the demo models.

    Raises QSpecError if the demo models cannot be made.
    """
    if model is None:
        from sglang_qspec.tools.models import demo_models

        models = demo_models(on_cuda=on_cuda)
        model, draft_model = str(models.target), str(models.draft)
        logger.info(
            "without --model the demo models answer: target %s, draft %s", model, draft_model
        )
    flags = ["--model-path", model, "--stream-interval", str(STREAM_TOKENS)]
    flags += ["--speculative-algorithm", "QSPEC"]
    if draft_model is not None:
        flags += ["--speculative-draft-model-path", draft_model]
    return flags, config.server_environment("cuda" if on_cuda else "cpu")


class OwnServer(HttpServer):
    """A server of a child process. `open` starts the process, also after it died."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        timeout: float,
        in_flight: int | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """The child process is a `LocalServer` of `arguments`, `environment`, `log` and `cpus`.

        `timeout` and `in_flight` are those of `HttpServer`.
        """
        super().__init__("", timeout=timeout, in_flight=in_flight)
        self.name = "the server"
        self._log = log
        self._new_process = partial(LocalServer, arguments, environment, log, cpus=cpus)
        self._process: LocalServer | None = None
        self._deaths = 0

    async def open(self) -> None:
        """Start a process and wait until it answers. Raises BatchError if it does not start."""
        await self.close()
        if self._deaths == DEATHS:
            raise BatchError(
                f"the server ended {DEATHS} times without an answer; its log is {self._log}"
            )
        self._deaths += 1  # until it answers a line
        self._process = process = self._new_process()
        self._http = Http(process.url, process.listens)
        logger.info("starting a server; its log is %s", self._log)
        process.launch()
        while not await self._is_ready():
            if process.has_failed_to_start:
                raise BatchError(f"the start of the server {process.obituary()}")
            await asyncio.sleep(POLL_S)
        logger.info("the server answers after %.0f s", process.age)

    async def _is_ready(self) -> bool:
        try:
            await super().open()
        except ServerLostError:
            return False
        return True

    async def ask(
        self, line: Line, guesses: Sequence[Guess] = (), note: Note | None = None
    ) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError."""
        reply = await super().ask(line, guesses, note)
        self._deaths = 0
        return reply

    async def close(self) -> None:
        """End the process and all processes below it."""
        await super().close()
        process, self._process = self._process, None
        if process is not None:
            process.stop()
