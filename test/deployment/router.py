"""SGLang's router, `sglang_router.launch_router`, as a child process of a test."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from sglang_qspec.tools.ports import free_port

START_SECONDS = 180.0
STOP_SECONDS = 15.0


class Router:
    """A router in front of the servers at `urls`, as a context manager; `arguments` are flags."""

    def __init__(self, urls: Sequence[str], *arguments: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            *(sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
            *arguments,
        ]
        self._log = tempfile.NamedTemporaryFile(prefix="router-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the router did not start:\n{self.log[-4000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        """The router's output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """The response to a GET request, whatever its status."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The response to a request of httpx, whatever its status."""
        return httpx.request(method, self.url + path, timeout=60, trust_env=False, **options)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The response to a JSON request, whatever its status."""
        return httpx.post(self.url + path, json=body, timeout=300, trust_env=False)

    def _is_ready(self) -> bool:
        try:
            return self.get("/readiness").status_code == 200
        except httpx.HTTPError:
            return False
