"""The web server of `qspec show`: whom it answers, and what it sends."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ClientError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.guesses.earlier import Earlier, EarlierAnswers
from sglang_qspec.tools.show import server as module
from sglang_qspec.tools.show.server import ShowServer
from test.tools.show.answers import SKY, long
from test.tools.show.browser import shown
from test.tools.show.upstream import Script, Upstream, upstream

QUESTION = {"prompt": "Why?", "chat": False}


@pytest.fixture
def asked() -> Iterator[Upstream]:
    with upstream(SKY) as server:
        yield server


@pytest.fixture
def show(asked: Upstream) -> Iterator[ShowServer]:
    with shown(asked.url, ["One?"]) as server:
        yield server


def request(
    show: ShowServer,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str, Mapping[str, str]]:
    """Status, body and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", show.server_port, timeout=60)
    connection.request(method, path, body, dict(headers or {}))
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.headers)
    connection.close()
    return found


def events(show: ShowServer, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    status, text, _ = request(show, "POST", "/ask", json.dumps(question).encode())
    assert status == 200
    return [json.loads(line) for line in text.splitlines()]


def test_every_answer_has_a_policy_that_allows_only_its_own_files(show: ShowServer) -> None:
    for path in ("/", "/page.js", "/page.css", "/server", "/saved.html", "/absent"):
        _, text, headers = request(show, "GET", path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert text


@pytest.mark.parametrize("path", ["/absent", "/../server.py", "/static/page.js", "/%2e%2e/x"])
def test_only_the_files_of_the_page_are_served(show: ShowServer, path: str) -> None:
    assert request(show, "GET", path)[0] == 404
    assert request(show, "POST", path, b"{}")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "[::1"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(show: ShowServer, host: str) -> None:
    given = {"Host": host.format(port=show.server_port)}
    for method, path in (("GET", "/"), ("POST", "/ask")):
        status, text, _ = request(show, method, path, b"{}", given)
        assert status == 403
        assert "is not the address of this page" in text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "192.168.1.7"])
def test_addresses_and_localhost_are_answered(show: ShowServer, host: str) -> None:
    for port in (show.server_port, 8080):  # a forwarded connection has a port of its own
        assert request(show, "GET", "/", headers={"Host": f"{host}:{port}"})[0] == 200


def test_a_page_may_have_an_ipv6_address(asked: Upstream) -> None:
    with ShowServer("::", 0, Client(asked.url), []) as server:
        assert server.url == f"http://[::1]:{server.server_port}/"


def test_a_name_of_the_host_may_have_capitals(show: ShowServer) -> None:
    show.host = "MyBox"
    assert request(show, "GET", "/", headers={"Host": "mybox:80"})[0] == 200


def test_a_page_of_another_site_cannot_ask(show: ShowServer, asked: Upstream) -> None:
    given = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    assert request(show, "POST", "/ask", json.dumps(QUESTION).encode(), given)[0] == 403
    assert asked.asked == []


def test_a_question_that_is_too_large_is_refused(
    show: ShowServer, asked: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 10)
    status, text, _ = request(show, "POST", "/ask", b"x" * 11)
    assert (status, text) == (413, "the question has 11 bytes; at most 10 are allowed")
    assert asked.asked == []


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 21, "\u00b2", "-1", "1e3", "0x10", "", " "])
def test_a_length_that_is_no_number_is_refused(
    show: ShowServer, asked: Upstream, length: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"Content-Length": length}
    status, text, _ = request(show, "POST", "/ask", b"", given)
    assert status in (411, 413)
    assert len(text) < 200
    assert asked.asked == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("body", [b"[" * 5000, b"\xff", b'{"prompt": "\xff"}', b""])
def test_a_question_that_is_no_json_is_an_error(
    show: ShowServer, body: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = request(show, "POST", "/ask", body)
    assert status == 200
    assert "the question is not allowed" in json.loads(text)["error"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({}, "missing required field `prompt`"),
        ({"prompt": ""}, "Expected `str` of length >= 1"),
        ({"prompt": "Hi", "max_new_tokens": 0}, "`int` >= 1 - at `$.max_new_tokens`"),
        ({"prompt": "Hi", "url": "http://x"}, "unknown field `url`"),
        ({"prompt": "<NGRAMGUESS>Hi"}, "never closed"),
    ],
)
def test_a_wrong_question_is_an_error_that_names_the_field(
    show: ShowServer, asked: Upstream, question: dict[str, Any], words: str
) -> None:
    (event,) = events(show, question)
    assert words in event["error"]
    assert asked.asked == []


def test_the_events_of_an_answer_are_its_new_tokens_and_passes(show: ShowServer) -> None:
    *pieces, last, end = events(show, QUESTION)
    assert [piece["first"] for piece in pieces] == [0, 1, 4, 5, 9]
    tokens = [tuple(token) for piece in pieces for token in piece["tokens"]]
    assert tokens == SKY.tokens
    assert not any("passes" in piece for piece in pieces)
    assert len(last["passes"]) == 4
    assert all(text == "" for text, _ in last["tokens"])
    assert {name: end["end"][name] for name in ("tokens", "reason", "omitted_passes")} == {
        "tokens": 10,
        "reason": "stop",
        "omitted_passes": 0,
    }
    assert end["end"]["seconds"] >= end["end"]["first_seconds"] > 0


def test_a_stream_of_new_tokens_only_gives_the_same_events() -> None:
    script = Script(SKY.first, SKY.passes, incremental=True)
    found = []
    for one in (SKY, script):
        with upstream(one) as server, shown(server.url) as show:
            found.append(events(show, QUESTION)[:-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("incremental", [False, True])
def test_all_tokens_are_the_targets_once_speculation_has_failed(
    incremental: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(SKY.first, SKY.passes, incremental=incremental, speculates=False)
    with upstream(script) as server, shown(server.url) as show:
        *pieces, _, end = events(show, QUESTION)
        assert main(["complete", "Why?", "--url", server.url, "--show-drafts"]) == 0
    tokens = [tuple(token) for piece in pieces for token in piece["tokens"]]
    assert tokens == [(text, "target") for text, _ in SKY.tokens]
    assert end["end"]["tokens"] == len(SKY.tokens)
    assert capsys.readouterr().out.startswith(SKY.text)


def test_the_request_asks_for_what_the_question_says(show: ShowServer, asked: Upstream) -> None:
    question = {"temperature": 0.7, "seed": 3, "completions": 2, "max_new_tokens": 9}
    events(show, {**QUESTION, **question})
    events(show, {"prompt": "Hi<NGRAMGUESS>Hello</NGRAMGUESS>"})
    plain, chat = asked.asked
    assert plain["text"] == "Why?"
    assert plain["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "sampling_seed": 3,
        "custom_params": {
            "qspec_return_provenance": True,
            "qspec_return_trace": True,
            "qspec_completions": 2,
        },
    }
    assert chat["input_ids"] == list(b"Hi")
    assert chat["sampling_params"]["custom_params"]["qspec_guesses"] == ["Hello"]


def test_an_answer_that_is_no_answer_is_an_error_of_one_line(show: ShowServer) -> None:
    script = Script("", [], refusal=(200, "odd"))
    with upstream(script) as server, shown(server.url) as other:
        (event,) = events(other, QUESTION)
    assert event["error"] == f"the answer of {server.url} is odd: KeyError: 'meta_info'"


def test_the_page_knows_server_model_and_prompts(show: ShowServer, asked: Upstream) -> None:
    about = json.loads(request(show, "GET", "/server")[1])
    assert about == {"url": asked.url, "model": "/models/<tiny>", "prompts": ["One?"]}


def test_a_port_in_use_is_a_client_error(show: ShowServer, asked: Upstream) -> None:
    with pytest.raises(ClientError, match=f"the address 127.0.0.1:{show.server_port} cannot be"):
        ShowServer("127.0.0.1", show.server_port, Client(asked.url), [])


def test_a_long_answer_is_streamed_in_pieces_of_constant_size() -> None:
    with upstream(long(400)) as server, shown(server.url) as show:
        *pieces, last, end = events(show, QUESTION)
    assert max(len(json.dumps(event)) for event in (*pieces, end)) < 1000
    assert len(last["passes"]) == 100


def test_answers_of_an_earlier_batch_are_guesses(asked: Upstream, tmp_path: Path) -> None:
    answers, requests = tmp_path / "answers", tmp_path / "requests"
    tagged = "Why?<NGRAMGUESS>Hello</NGRAMGUESS>"
    body = {"choices": [{"text": "Because"}]}
    answers.write_text(json.dumps({"custom_id": "1", "response": {"body": body}}))
    messages = [{"role": "user", "content": "Why?"}]
    lines = [{"messages": messages}, {"prompt": tagged, "custom_id": "1"}]
    requests.write_text("\n".join(map(json.dumps, lines)))
    with (
        EarlierAnswers.open([Earlier(answers, requests)]) as earlier,
        shown(asked.url, earlier=earlier) as show,
    ):
        for prompt, chat, speculate, guesses in (
            ("Why?", False, True, ["Because"]),
            ("Why?", True, True, ["Because"]),
            (tagged, True, True, ["Hello", "Because"]),
            (tagged, False, True, None),
            ("Why?", True, False, None),
            ("What?", True, True, None),
        ):
            events(show, {"prompt": prompt, "chat": chat, "speculate": speculate})
            custom = asked.asked[-1]["sampling_params"]["custom_params"]
            assert custom.get("qspec_guesses") == guesses
