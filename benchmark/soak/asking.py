"""Sends a request of the soak, as a client that may hang up before the end of its answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from benchmark.harness.server import Server, ServerError

LIMIT_S = 1200.0
"""Time limit of a request; no answer takes so long, even on a busy machine and behind a burst."""


@dataclass
class Outcome:
    """The end of a request."""

    status: int | None
    """HTTP status, or the code of an error in the stream; None without an answer."""
    data: Any
    """The decoded answer, or the list of the received pieces."""
    streamed: bool
    hung_up: bool = False
    """Whether the client closed the connection before the end of the answer."""
    error: str | None = None
    seconds: float = 0.0


def ask(
    server: Server,
    path: str,
    body: dict[str, Any],
    *,
    hang_up_s: float | None = None,
    pieces: int | None = None,
) -> Outcome:
    """Send the request and read its answer; the outcome holds errors, and none is raised.

    The client hangs up after `hang_up_s` seconds, or after `pieces` pieces of a stream.
    """
    began = time.monotonic()
    outcome = Outcome(None, [], bool(body.get("stream")))
    limit = LIMIT_S if hang_up_s is None else hang_up_s
    try:
        if outcome.streamed:
            _read_pieces(server.stream(path, body, limit), pieces, began + limit, outcome)
        else:
            outcome.data = server.post(path, body, limit)
            outcome.status = 200
    except TimeoutError:
        outcome.hung_up = hang_up_s is not None
        outcome.error = None if outcome.hung_up else f"no answer in {LIMIT_S:g} s"
    except ServerError as error:
        outcome.status, outcome.error = error.status, str(error)
    except (OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = time.monotonic() - began
    return outcome


def _read_pieces(
    pieces: Generator[Any], most: int | None, deadline: float, outcome: Outcome
) -> None:
    """Read a stream until its end, or hang up after `most` pieces. Raises what the stream raises.

    The limit of the stream is that of a single read; the deadline is checked at each piece.
    """
    with contextlib.closing(pieces):
        for piece in pieces:
            outcome.status = 200
            outcome.data.append(piece)
            outcome.hung_up = most is not None and len(outcome.data) >= most
            if outcome.hung_up:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError
