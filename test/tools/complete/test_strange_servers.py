"""`qspec complete`, `show`, `top` and `measure` with servers that send what SGLang does not."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import AnswerError, ClientError
from sglang_qspec.tools.complete import peers
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.peers import MAX_NESTING, decode
from sglang_qspec.tools.complete.pieces import whole
from sglang_qspec.tools.complete.token_texts import TokenTexts
from sglang_qspec.tools.show.question import Question, ask
from test.strange_server import (
    DEEP,
    PIECE,
    Answer,
    endless,
    response,
    strange,
    strange_responses,
)
from test.tools.top.recorded import LOADED

STATE = LOADED[0].state
INFO = {"model_path": "m", "internal_states": [{"qspec": STATE}]}
COMMANDS = (
    ["complete", "Hi"],
    ["complete", "Hi", "--show-drafts"],
    ["top", "--once", "--interval", "0.1"],
    ["show", "--host", "no address"],
    ["measure", "--output", "tables.json"],
)
META = {"completion_tokens": 1, "finish_reason": {"type": "stop"}, "qspec": {"passes": 1}}
PIECE_OF_ANSWER = {"text": "a", "output_ids": [0], "meta_info": META}
TREE: dict[str, Any] = {
    name: [] for name in ("ids", "texts", "parents", "sources", "chances", "accepted")
}
PASS: dict[str, Any] = {
    "start": 1,
    "tokens": 1,
    "rows": 1,
    "batch_requests": 1,
    "batch_rows": 1,
    "ms": 1.0,
    "pipeline": "queue",
    "match": None,
    "tree": TREE,
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", strange_responses(""))
def test_a_strange_answer_is_an_error_of_one_line(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with strange(lambda path, body: response(INFO)) as other:  # noqa: ARG005
        odd = strange_responses(other.url + "/server_info")[name]
        with strange(lambda path, body: odd()) as server:  # noqa: ARG005
            assert main([*command, "--url", server.url]) == 1
        assert other.asked == []
    assert max(server.sent, default=0) < 2 * peers.MAX_BYTES
    assert_one_line(capsys)


def test_even_a_small_compressed_answer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Its bound would otherwise be one of compressed bytes."""
    data = gzip.compress(json.dumps(PIECE_OF_ANSWER).encode())
    with strange(lambda path, body: response(data, "Content-Encoding: gzip")) as server:  # noqa: ARG005
        assert main(["complete", "Hi", "--url", server.url]) == 1
    assert "is compressed (gzip)" in assert_one_line(capsys)


def assert_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("qspec: ")
    assert said.count("\n") == 1
    assert said.strip().isprintable()
    assert len(said) < 600
    return said


@pytest.mark.parametrize(
    "info",
    [
        {"internal_states": 7},
        {"internal_states": [7]},
        {"internal_states": [{"qspec": 7}]},
        {"internal_states": [{"qspec": {"dp_rank": 1}}, {"qspec": {"dp_rank": "x"}}]},
        {"internal_states": [{"qspec": {"dp_rank": []}}, {"qspec": {"dp_rank": {}}}]},
        {"internal_states": [{"qspec": {**STATE, "pipelines": {"queue": {"passes": "x"}}}}]},
        {"internal_states": [{"qspec": {**STATE, "pipelines": {"queue": None}}}]},
        {"internal_states": [{"qspec": {**STATE, "sidecar_backlog_seconds": 10**400}}]},
        {"internal_states": [{"qspec": {**STATE, "dropped_messages": ["a"]}}]},
        {"internal_states": [{"qspec": {**STATE, "sidecars": [7, 8]}}]},
        {"internal_states": [{"qspec": {**STATE, "settings": {"draft_token_num": "many"}}}]},
        {"internal_states": [{"qspec": {**STATE, "sidecar": [[]]}}]},
    ],
    ids=lambda info: str(info)[:60],
)
@pytest.mark.parametrize("command", [COMMANDS[2], COMMANDS[4]], ids=" ".join)
def test_figures_of_other_types_are_an_error_of_one_line(
    command: list[str], info: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with strange(lambda path, body: response(info)) as server:  # noqa: ARG005
        assert main([*command, "--url", server.url]) == 1
    assert_one_line(capsys)


def test_top_shows_no_controls_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[2J[/red]:bomb:[link=http://x]" + "x" * 1000
    state = {**STATE, "pipeline": text, "sidecar": text, "sidecar_overload": text}
    state["pipelines"] = {**state["pipelines"], text: {"passes": 1}}
    info = {"internal_states": [{"qspec": state}]}
    with strange(lambda path, body: response(info)) as server:  # noqa: ARG005
        assert main([*COMMANDS[2], "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "pipeline [2J[/red]:bomb:[link=http://x]xxx" in " ".join(out.split())
    assert len(out) < 4000


def stream(*pieces: Any) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    for piece in pieces:
        yield b"data: " + (piece if isinstance(piece, bytes) else json.dumps(piece).encode())
        yield b"\n\n"


def endless_pieces() -> Iterator[bytes]:
    """Pieces of new tokens without an end, each longer than its tokens."""
    new = {"text": "x" * PIECE, "output_ids": [], "meta_info": {"completion_tokens": 9}}
    yield from stream(*[new] * 80)


def changed(**fields: Any) -> dict[str, Any]:
    return {**PIECE_OF_ANSWER, **fields}


def meta(**fields: Any) -> dict[str, Any]:
    return changed(meta_info={**META, **fields})


def trace(**fields: Any) -> dict[str, Any]:
    return meta(qspec_trace={"passes": [{**PASS, **fields}], "omitted_passes": 0})


STREAMS: dict[str, Callable[[], Answer]] = {
    **strange_responses(""),
    "endless pieces": endless_pieces,
    "endless line": lambda: endless(b"data: "),
    "deep piece": lambda: stream(DEEP),
    "list": lambda: stream([1]),
    "error": lambda: stream({"error": {"message": "\x1b[2Jno\nline"}}),
    "deep trace": lambda: stream(b'{"meta_info": ' + DEEP + b"}"),
    "no meta": lambda: stream({"text": "a", "output_ids": []}),
    "no ids": lambda: stream(changed(output_ids=None)),
    "text is a number": lambda: stream(changed(text=7)),
    "count is a text": lambda: stream(meta(completion_tokens="x")),
    "meta is a list": lambda: stream(changed(meta_info=[])),
}
TRACES: dict[str, Callable[[], Answer]] = {
    "list": lambda: stream(meta(qspec_trace=[1])),
    "text": lambda: stream(meta(qspec_trace="x")),
    "passes are a text": lambda: stream(meta(qspec_trace={"passes": "x", "omitted_passes": 0})),
    "pass is a number": lambda: stream(meta(qspec_trace={"passes": [7], "omitted_passes": 0})),
    "many tokens": lambda: stream(trace(tokens=10**9)),
    "negative": lambda: stream(trace(start=-1)),
    "tree is a list": lambda: stream(trace(tree=[])),
    "sources are numbers": lambda: stream(trace(tree={**TREE, "sources": [1]})),
    "source is a number": lambda: stream(meta(qspec_provenance=[7])),
    "sources are a number": lambda: stream(meta(qspec_provenance=7)),
    "no reason": lambda: stream(meta(finish_reason={})),
}


def answering(odd: Callable[[], Answer]) -> Callable[[str, bytes], Answer]:
    def answer(path: str, body: bytes) -> Answer:
        if path == "/server_info":
            return response(INFO)
        if path == "/detokenize":
            return response({"text": ["a"] * len(json.loads(body)["tokens"])})
        return odd()

    return answer


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]], ids=str)
@pytest.mark.parametrize("name", sorted(STREAMS))
def test_a_strange_stream_is_an_error_of_one_line(
    name: str, drafts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with strange(answering(STREAMS[name])) as server:
        assert main(["complete", "Hi", "--url", server.url, *drafts]) == 1
    assert max(server.sent) < 2 * peers.MAX_BYTES
    assert_one_line(capsys)


@pytest.mark.parametrize("name", [*STREAMS, *(f"trace: {name}" for name in TRACES)])
def test_a_strange_stream_is_an_error_of_the_page(name: str) -> None:
    odd = TRACES[name.removeprefix("trace: ")] if name.startswith("trace") else STREAMS[name]
    with strange(answering(odd)) as server, pytest.raises(ClientError) as caught:
        list(map(json.dumps, ask(Client(server.url), Question("Hi", chat=False))))
    assert len(str(caught.value)) < 600


def test_a_right_stream_is_shown_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    piece = changed(text="a\x1b]0;owned\x07\tb\n\x9bc")
    with strange(answering(lambda: stream(piece))) as server:
        for drafts in ([], ["--show-drafts"]):
            assert main(["complete", "Hi", "--url", server.url, *drafts]) == 0
            assert capsys.readouterr().out.startswith("a]0;owned\tb\nc")


def test_many_new_tokens_are_decoded_some_at_a_time() -> None:
    sizes: list[int] = []

    def decode_ids(batch: Any) -> list[str]:
        sizes.append(sum(map(len, batch)))
        return ["x" * len(ids) for ids in batch]

    texts = TokenTexts(decode_ids)
    assert texts.take("x" * 5000, range(5000)) == ["x"] * 5000
    assert max(sizes) < 20_000


def test_pieces_of_new_tokens_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_BYTES", 1000)
    pieces = (
        {"text": "x", "output_ids": [1], "meta_info": {"completion_tokens": n + 2}}
        for n in range(100)
    )
    with pytest.raises(AnswerError, match="is longer than"):
        list(whole(pieces))


@pytest.mark.parametrize("nesting", [1, MAX_NESTING - 1])
def test_json_of_any_server_is_decoded(nesting: int) -> None:
    value: Any = {"text": "é\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")}
    for number in range(nesting - 1):
        value = [value] if number % 2 else {"a": value}
    assert decode(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "data",
    [
        b"[" * (MAX_NESTING + 2) + b"]" * (MAX_NESTING + 2),
        b'{"a":' * 100 + b"1" + b"}" * 100,
        DEEP,
        b"[" * 10**6,
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        b"\xff",
        "1".encode("utf-16"),
        b"1" * 5000,
        b"",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_cannot_be_written_again_is_an_answer_error(data: bytes) -> None:
    with pytest.raises(AnswerError, match="^is not JSON"):
        decode(data)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x", "http://", "http://x:y", "http://u:p@x", "http://x:99999"],
)
def test_an_address_of_another_kind_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "Hi", "--url", url]) == 1
    assert re.match("qspec: the address is '", assert_one_line(capsys))


def test_a_proxy_of_the_environment_gets_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        strange(lambda path, body: response(INFO)) as proxy,  # noqa: ARG005
        strange(lambda path, body: response(INFO)) as server,  # noqa: ARG005
    ):
        monkeypatch.setenv("http_proxy", proxy.url)
        Client(server.url).state()
        assert (len(proxy.asked), len(server.asked)) == (0, 1)
