"""A client of the soak; a small server stands in for SGLang."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.harness.server import Server
from benchmark.soak.asking import ask

PIECES: dict[str, list[str]] = {
    "/good": ['{"n": 1}', '{"n": 2}', "[DONE]"],
    "/cut": ['{"n": 1}'],
    "/odd": ['{"error": 3}', "[DONE]"],
    "/error": ['{"n": 1}', '{"error": {"code": 503, "message": "busy"}}', "[DONE]"],
}
SLOW_S = 5.0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if self.path == "/bad" else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(b'{"text": "whole"}')
            return
        for piece in PIECES.get(self.path, ['{"n": 1}']):
            self.wfile.write(f"data: {piece}\n\n".encode())
        if self.path == "/slow":
            self.wfile.flush()
            time.sleep(SLOW_S)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server("model")
    with http.server.ThreadingHTTPServer(("127.0.0.1", found.port), Handler) as stand_in:
        stand_in.daemon_threads = True
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        yield found
        stand_in.shutdown()


STREAM = {"stream": True}


def test_an_answer_is_read_whole_or_in_chunks(server: Server) -> None:
    whole = ask(server, "/good", {})
    assert (whole.status, whole.data, whole.error) == (200, {"text": "whole"}, None)
    streamed = ask(server, "/good", STREAM)
    assert (streamed.data, streamed.error, streamed.hung_up) == ([{"n": 1}, {"n": 2}], None, False)


def test_a_client_hangs_up_after_a_number_of_chunks_or_seconds(server: Server) -> None:
    by_pieces = ask(server, "/good", STREAM, pieces=1)
    assert (by_pieces.data, by_pieces.hung_up, by_pieces.error) == ([{"n": 1}], True, None)
    by_time = ask(server, "/slow", STREAM, hang_up_s=0.5)
    assert (by_time.hung_up, by_time.error) == (True, None)
    assert by_time.seconds < SLOW_S


def test_a_refused_request_a_broken_stream_and_an_absent_server_are_errors(server: Server) -> None:
    refused = ask(server, "/bad", {})
    assert (refused.status, refused.error) == (400, 'HTTP 400: {"text": "whole"}')
    cut = ask(server, "/cut", STREAM)
    assert cut.data == [{"n": 1}]
    assert "before [DONE]" in (cut.error or "")
    error = ask(server, "/error", STREAM)
    assert error.status == 503
    assert "busy" in (error.error or "")
    odd = ask(server, "/odd", STREAM)
    assert (odd.status, odd.error) == (400, "3")
    assert "Connect" in (ask(Server("model"), "/good", {}).error or "")
