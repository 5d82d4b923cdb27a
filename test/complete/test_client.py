"""`qspec complete` without a QSPEC server: one sentence, and exit status 1."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_qspec.__main__ import main


@contextmanager
def something_else(body: bytes) -> Iterator[str]:
    """A web server that answers every request with `body`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Logs nothing to stderr, because the test reads stderr."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_address[1]}"
        other.shutdown()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "is not JSON"),
        (b"{}", "is not an SGLang server"),
        (b'{"internal_states": [{}]}', "does not speculate with QSPEC"),
    ],
)
def test_a_server_without_qspec_is_an_error_of_one_sentence(
    capsys: pytest.CaptureFixture[str], body: bytes, words: str
) -> None:
    with something_else(body) as url:
        assert main(["complete", "--url", url, "Hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"qspec: .*{words}.*\n", captured.err)


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://127.0.0.1:1", "no server answers at"), ("nonsense", "the address is 'nonsense'")],
)
def test_a_missing_server_is_an_error_of_one_sentence(
    capsys: pytest.CaptureFixture[str], url: str, words: str
) -> None:
    assert main(["complete", "--url", url, "Hi"]) == 1
    assert re.fullmatch(rf"qspec: .*{words}.*\n", capsys.readouterr().err)
