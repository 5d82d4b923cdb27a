"""`qspec complete` with another server, or without one: one sentence, and exit status 1."""

import asyncio
import re
from contextlib import aclosing

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ClientError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.http import Failure, Http
from test.strange_server import response, strange


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
    with strange(lambda *_: response(body)) as server:
        assert main(["complete", "--url", server.url, "Hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"qspec: .*{words}.*\n", captured.err)


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://127.0.0.1:1", "no server answers at"), ("nonsense", "the address is 'nonsense'")],
)
@pytest.mark.parametrize("command", [["complete", "Hi"], ["show"], ["top"]])
def test_a_missing_server_is_an_error_of_one_sentence(
    capsys: pytest.CaptureFixture[str], command: list[str], url: str, words: str
) -> None:
    assert main([*command, "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"qspec: .*{words}.*\n", captured.err)


@pytest.mark.parametrize(
    "line", [b'data: {"text": "a', b"data: 7", b'data: "text"', b"data: null", b'data: {"\xff": 1}']
)
def test_a_malformed_line_of_a_stream_is_a_client_error(line: bytes) -> None:
    body = b'data: {"text": "a"}\n\n' + line + b"\n\ndata: [DONE]\n\n"
    with strange(lambda *_: response(body)) as server:
        pieces = Client(server.url).generate("Hi", {})
        assert next(pieces) == {"text": "a"}
        with pytest.raises(ClientError, match=f"{server.url}/generate sent a line that is not "):
            next(pieces)


def test_what_came_before_the_connection_broke_is_not_lost() -> None:
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\na\nb\n\r\n"
    found: list[bytes] = []

    async def read(url: str) -> None:
        async with aclosing(Http(url)) as http, http.request("/", within=60) as response:
            await asyncio.sleep(0.5)  # the connection breaks meanwhile
            async for line in http.lines(response):
                found.append(line)

    with strange(lambda *_: body) as server, pytest.raises(Failure):
        asyncio.run(read(server.url))
    assert found == [b"a", b"b"]


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"7", b'{"text": null}', b'{"text": [1, 2]}', b'{"text": ["a"]}']
)
def test_a_detokenize_answer_without_a_text_for_each_list_is_a_client_error(body: bytes) -> None:
    with strange(lambda *_: response(body)) as server:
        words = f"{server.url}/detokenize did not send the text of 2 lists"
        with pytest.raises(ClientError, match=words):
            Client(server.url).decode([[1], [2]])
