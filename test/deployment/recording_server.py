"""An HTTP server that stands in for SGLang behind a router, and records what reaches it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from sglang_qspec.tools.ports import free_port

MODEL = "model"
DESCRIPTION = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "data": [{"id": MODEL}],
}
"""Answers a router's questions about a server: /server_info, /model_info and /v1/models."""
ANSWER = {"text": "", "meta_info": {"qspec": {"passes": 1}}}


class RecordingServer:
    """Answers every POST with `status` after `delay` seconds, as a context manager.

    `bodies` are the bodies of all POST requests so far, {} for a request without one, and `asked`
    the methods and paths of all requests. Without `is_healthy` it answers every GET with HTTP 503.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.status = 200
        self.delay = 0.0
        self.is_healthy = True
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.asked.append(f"GET {self.path}")
                self._answer(200 if owner.is_healthy else 503, DESCRIPTION)

            def do_POST(self) -> None:
                owner.asked.append(f"POST {self.path}")
                size = int(self.headers.get("Content-Length", 0))
                owner.bodies.append(json.loads(self.rfile.read(size) or "{}"))
                time.sleep(owner.delay)
                self._answer(owner.status, ANSWER)

            def _answer(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
