"""Runs a real SGLang server as child processes, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from sglang_qspec.tools.local_server import LocalServer

START_SECONDS = 600.0
STOP_SECONDS = 60.0
"""Time limit for the end of a server that is asked to end; a starved one needs seconds."""
CRASH_SECONDS = 5.0
"""Time limit for the end of a server that crashes in a request."""


class ServerError(RuntimeError):
    """The server did not start, or answered with an error.

    The message has the end of the log, or the status code and the text of the answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, or the code of an error in a stream; None without an answer."""


class StartTimeoutError(ServerError):
    """The server was not ready in START_SECONDS."""


class Server(LocalServer):
    """A server that benchmarks and tests ask, as a context manager.

    Requests raise ServerError if the server answers with an error, and OSError if the connection
    fails or times out.
    """

    health = "/health_generate"
    """Path that answers once the server can serve a request."""
    stop_seconds = STOP_SECONDS

    def __init__(
        self,
        model: Path | str,
        arguments: Sequence[str] = (),
        *,
        cores: Sequence[int] = (),
        pinned_from_start: bool = False,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        """`arguments` are the server's flags without host, port and model.

        `cores` pins the server's processes (a sidecar pins itself) and sets their number of
        threads. By default they are pinned once the server is ready, because the start takes twice
        as long on one core. A server with `pinned_from_start` knows its cores, and so whether a
        sidecar shares them. `environment` is added to that of this process. `launcher` is what
        Python runs.
        """
        self._cores = tuple(cores)
        self._temporary = tempfile.NamedTemporaryFile(prefix="sglang-server-", suffix=".log")  # noqa: SIM115
        threads = {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
        super().__init__(
            ["--model-path", str(model), *arguments],
            {**os.environ, **(environment or {}), **threads},
            Path(self._temporary.name),
            cpus=frozenset(cores) if cores and pinned_from_start else None,
            launcher=launcher,
        )
        # A connection that idles while the server is paused would fail in the next request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            # An interrupt does not reach the server, which is in a process group of its own.
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start, unless `launch` has, and wait until a request would be served.

        Raises ServerError.
        """
        if self._process is None:
            self.launch()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.exit_code() is not None:
                raise ServerError(f"the server {self.obituary()}")
            try:
                self._check_port()
                self.get(self.health, timeout=30)
            except (ServerError, OSError):
                time.sleep(0.25)
            else:
                self._pin()
                return
        obituary = self.obituary()
        self.stop()
        raise StartTimeoutError(f"the start of the server {obituary}")

    def _check_port(self) -> None:
        """Raise ServerError unless the server, and no other process, listens on its port."""
        if not self.listens():
            raise ServerError(f"the server does not listen on port {self.port}")

    @property
    def private_bytes(self) -> int:
        """Memory that the server's processes do not share with others, in bytes."""
        total = 0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total

    def _pin(self) -> None:
        """Pin the server's threads to its cores, except processes that have pinned themselves."""
        everywhere = os.sched_getaffinity(0)
        for process in self.processes if self._cores else ():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.sched_getaffinity(process.pid) == everywhere:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, self._cores)

    def pause(self) -> None:
        """Stop all processes until `resume`; an idle scheduler would use a whole core."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        """Continue all processes."""
        self._each(psutil.Process.resume)

    def _each(self, act: Callable[[psutil.Process], object]) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)

    def explain(self, error: Exception) -> Exception:
        """Returns `error`, or an error with the end of the log if the server has ended."""
        if self.exit_code(CRASH_SECONDS) is None:
            return error
        return ServerError(f"the server {self.obituary()}")

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> Any:
        """The answer to a JSON request, decoded if it is JSON."""
        return _answer(self._request("POST", path, timeout, json=body))

    def get(self, path: str, timeout: float = 600.0) -> Any:
        """The answer to a GET request, decoded if it is JSON."""
        return _answer(self._request("GET", path, timeout))

    def stream(
        self, path: str, body: dict[str, Any], timeout: float = 600.0
    ) -> Generator[dict[str, Any]]:
        """The pieces of a streamed answer to a JSON request, as they come; closing it hangs up."""
        with (
            _connection_errors(),
            self._client.stream("POST", path, json=body, timeout=timeout) as response,
        ):
            if response.is_error:
                response.read()
                _answer(response)
            for piece in events(response):
                if "error" in piece:
                    raise ServerError(str(piece["error"]), _code(piece["error"]))
                yield piece

    def _request(self, method: str, path: str, timeout: float, **body: Any) -> httpx.Response:
        with _connection_errors():
            return self._client.request(method, path, timeout=timeout, **body)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events.

    Raises ConnectionError if the stream ends before its `[DONE]`.
    """
    for line in response.iter_lines():
        data = line.removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise ConnectionError("the stream ended before [DONE]")


def _answer(response: httpx.Response) -> Any:
    """Raises ServerError."""
    if response.is_error:
        status = response.status_code
        raise ServerError(f"HTTP {status}: {response.text}", status)
    is_json = "json" in response.headers.get("Content-Type", "")
    return response.json() if is_json else response.text


def _code(error: Any) -> int:
    """The status in an error of a stream; 400 if there is none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 400


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise OSError instead of the connection errors of httpx."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TimeoutError(f"the server did not answer in time: {error!r}") from error
    except httpx.TransportError as error:
        raise ConnectionError(str(error) or repr(error)) from error


def reason(error: Exception) -> str:
    """The last line of the message that names an error; the message may be a log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "xception" in line]
    found = (telling or lines or [type(error).__name__])[-1]
    return found[:300]
