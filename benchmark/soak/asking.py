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
class Response:
    """What came back for a request, and how it ended."""

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
) -> Response:
    """Send the request and read its answer; the response holds errors, and none is raised.

    The client hangs up after `hang_up_s` seconds, or after `pieces` pieces of a stream.
    """
    began = time.monotonic()
    response = Response(None, [], bool(body.get("stream")))
    limit = LIMIT_S if hang_up_s is None else hang_up_s
    try:
        if response.streamed:
            _read_pieces(server.stream(path, body, limit), pieces, began + limit, response)
        else:
            response.data = server.post(path, body, limit)
            response.status = 200
    except TimeoutError:
        response.hung_up = hang_up_s is not None
        response.error = None if response.hung_up else f"no answer in {LIMIT_S:g} s"
    except ServerError as error:
        response.status, response.error = error.status, str(error)
    except (OSError, ValueError) as error:
        response.error = f"{type(error).__name__}: {error}"
    response.seconds = time.monotonic() - began
    return response


def _read_pieces(
    pieces: Generator[Any], most: int | None, deadline: float, response: Response
) -> None:
    """Read a stream until its end, or hang up after `most` pieces. Raises what the stream raises.

    The limit of the stream is that of a single read; the deadline is checked at each piece.
    """
    with contextlib.closing(pieces):
        for piece in pieces:
            response.status = 200
            response.data.append(piece)
            response.hung_up = most is not None and len(response.data) >= most
            if response.hung_up:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError
