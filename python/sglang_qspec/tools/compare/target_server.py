"""A server with the target alone, which writes answers and measures its own passes.

The server runs QSPEC without a draft model.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from sglang_qspec.config import server_environment
from sglang_qspec.errors import ClientError, QSpecError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.local_server import START_S, LocalServer
from sglang_qspec.tools.measure.pass_timer import PassTimer


class TargetServer(PassTimer):
    """`python -m sglang.launch_server` on a free port of 127.0.0.1, as a context manager."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        cpus: frozenset[int],
        slots: int,
        widest: int,
        context: int,
        flags: Sequence[str] = (),
    ) -> None:
        """`slots` requests run at once, each of at most `context` tokens, on `cpus`.

        `widest` is the largest number of tokens that a pass verifies for a request.
        """
        arguments = ["--model-path", model, "--log-level", "warning"]
        arguments += ["--max-running-requests", str(slots)]
        arguments += ["--speculative-algorithm", "QSPEC", "--speculative-qspec-verify", "tree"]
        arguments += ["--speculative-num-draft-tokens", str(widest)]
        if device == "cpu":
            arguments += ["--device", "cpu", "--max-total-tokens", str(2 * slots * context)]
        arguments += flags
        self._log = tempfile.NamedTemporaryFile(prefix="qspec-compare-", suffix=".log")  # noqa: SIM115
        environment = server_environment(device)
        self._server = LocalServer(arguments, environment, Path(self._log.name), cpus=cpus)
        super().__init__(Client(self._server.url, listens=self._server.listens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, tick: Callable[[], object]) -> None:
        """Start, and wait until the server answers. `tick` is called about once a second.

        Raises QSpecError with the end of the log if the server does not start.
        """
        self._server.launch()
        deadline = time.monotonic() + START_S
        while self._server.exit_code is None and time.monotonic() < deadline:
            tick()
            with contextlib.suppress(ClientError):
                self._client.state()
                return
            time.sleep(1.0)
        raise QSpecError(f"the start of the target's server {self._server.obituary()}")

    def stop(self) -> None:
        """End the server and every process below it."""
        self._server.stop()
        self._log.close()
