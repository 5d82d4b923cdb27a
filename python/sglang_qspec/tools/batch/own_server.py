"""A server on this machine that the batch starts, restarts and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_qspec import config
from sglang_qspec.errors import BatchError, ServerLostError
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.runner import ATTEMPTS
from sglang_qspec.tools.batch.server import Reply
from sglang_qspec.tools.local_server import START_S, LocalServer

logger = logging.getLogger(__name__)

POLL_S = 0.5
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
    flags = ["--model-path", model, "--speculative-algorithm", "QSPEC"]
    if draft_model is not None:
        flags += ["--speculative-draft-model-path", draft_model]
    return flags, config.server_environment("cuda" if on_cuda else "cpu")


class OwnServer:
    """A child process that serves lines. `open` starts it, also after it died."""

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
        """`arguments` are the server's flags without host and port, `log` gets its output.

        `timeout` and `in_flight` are those of `HttpServer`. The server runs on `cpus`; None means
        the CPUs of this process.
        """
        self.name = "the server"
        self._arguments, self._environment, self._log = arguments, environment, log
        self._timeout, self._in_flight, self._cpus = timeout, in_flight, cpus
        self._process: LocalServer | None = None
        self._http: HttpServer | None = None
        self._deaths = 0

    @property
    def depth(self) -> int:
        """Number of lines that the server should have at once."""
        return 0 if self._http is None else self._http.depth

    async def open(self) -> None:
        """Start a process and wait until it answers. Raises BatchError if it does not start."""
        await self.close()
        if self._deaths == DEATHS:
            raise BatchError(
                f"the server ended {DEATHS} times without an answer; its log is {self._log}"
            )
        self._deaths += 1  # until it answers a line
        process = LocalServer(self._arguments, self._environment, self._log, cpus=self._cpus)
        http = HttpServer(
            process.url,
            timeout=self._timeout,
            in_flight=self._in_flight,
            listens=lambda: process.listens(),
        )
        self._process, self._http = process, http
        began = time.monotonic()
        logger.info("starting a server; its log is %s", self._log)
        process.launch()
        while not await self._is_ready(http):
            if process.exit_code is not None or time.monotonic() - began > START_S:
                raise BatchError(f"the start of the server {process.obituary()}")
            await asyncio.sleep(POLL_S)
        logger.info("the server answers after %.0f s", time.monotonic() - began)

    async def _is_ready(self, http: HttpServer) -> bool:
        try:
            await http.open()
        except ServerLostError:
            return False
        return True

    async def ask(self, line: Line) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError."""
        if self._http is None:
            raise ServerLostError("the server does not run")
        reply = await self._http.ask(line)
        self._deaths = 0
        return reply

    async def close(self) -> None:
        """End the process and all processes below it."""
        http, self._http = self._http, None
        process, self._process = self._process, None
        if http is not None:
            await http.close()
        if process is not None:
            process.stop()
