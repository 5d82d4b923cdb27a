"""A server with the target alone, which writes answers and measures its own passes.

The server runs QSPEC without a draft model.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sglang_qspec.config import server_environment
from sglang_qspec.errors import ClientError, QSpecError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.local_server import LocalServer
from sglang_qspec.tools.measure.pass_timer import PassTimer


@contextlib.contextmanager
def target_server(
    model: str,
    *,
    device: str,
    cpus: frozenset[int],
    slots: int,
    widest: int,
    context: int,
    tick: Callable[[], object],
    flags: Sequence[str] = (),
) -> Iterator[PassTimer]:
    """Start a server on `cpus`, wait until it answers, and measure it; it ends with the context.

    `slots` requests run at once, each of at most `context` tokens. `widest` is the largest number
    of tokens that a pass verifies for a request. `tick` is called about once a second during the
    start. Raises QSpecError with the end of the log if the server does not start.
    """
    arguments = ["--model-path", model, "--log-level", "warning"]
    arguments += ["--max-running-requests", str(slots)]
    arguments += ["--speculative-algorithm", "QSPEC", "--speculative-qspec-verify", "tree"]
    arguments += ["--speculative-num-draft-tokens", str(widest)]
    if device == "cpu":
        arguments += ["--device", "cpu", "--max-total-tokens", str(2 * slots * context)]
    arguments += flags
    with tempfile.NamedTemporaryFile(prefix="qspec-compare-", suffix=".log") as log:
        server = LocalServer(arguments, server_environment(device), Path(log.name), cpus=cpus)
        client = Client(server.url, listens=server.listens)
        server.launch()
        try:
            while not _answers(client):
                if server.has_failed_to_start:
                    raise QSpecError(f"the start of the target's server {server.obituary()}")
                tick()
                time.sleep(1.0)
            yield PassTimer(client)
        finally:
            server.stop()


def _answers(client: Client) -> bool:
    with contextlib.suppress(ClientError):
        client.state()
        return True
    return False
