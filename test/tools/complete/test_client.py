"""`qspec complete` with another server, or without one: one sentence, and exit status 1."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ClientError
from sglang_qspec.tools.complete.client import Client


@contextmanager
def something_else(body: bytes) -> Iterator[str]:
    """A web server that answers every request with `body`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

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


@pytest.mark.parametrize(
    "line", [b'data: {"text": "a', b"data: 7", b'data: "text"', b"data: null", b'data: {"\xff": 1}']
)
def test_a_malformed_line_of_a_stream_is_a_client_error(line: bytes) -> None:
    with something_else(b'data: {"text": "a"}\n\n' + line + b"\n\ndata: [DONE]\n\n") as url:
        pieces = Client(url).generate("Hi", {})
        assert next(pieces) == {"text": "a"}
        with pytest.raises(ClientError, match=f"{url}/generate sent a line that is not "):
            next(pieces)


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"7", b'{"text": null}', b'{"text": [1, 2]}', b'{"text": ["a"]}']
)
def test_a_detokenize_answer_without_a_text_for_each_list_is_a_client_error(body: bytes) -> None:
    with (
        something_else(body) as url,
        pytest.raises(ClientError, match=f"{url}/detokenize did not send the text of 2 lists"),
    ):
        Client(url).decode([[1], [2]])
