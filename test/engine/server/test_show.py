"""`qspec show` with a running server."""

from pathlib import Path

import pytest

from benchmark.harness.server import Server
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.show.question import Question, ask
from test.engine.server.running import GREEDY, generate
from test.tools.show.browser import Page, chromium, shown

pytestmark = pytest.mark.server

PROMPT = "Repeat after me: 你好, naïve café 🙂🙂! 你好, naïve café 🙂🙂! 你好, naïve"
TOKENS = 24


def test_the_events_of_an_answer_have_its_text_and_a_pass_for_each_token(server: Server) -> None:
    """Characters of the text have several bytes, and some of them several tokens."""
    expected = generate(server, PROMPT, max_new_tokens=TOKENS)["text"]
    tagged = f"{PROMPT}<NGRAMGUESS>{expected}</NGRAMGUESS>"
    question = Question(tagged, chat=False, max_new_tokens=TOKENS)
    *events, last = ask(Client(server.url), question)
    tokens: list[list[str]] = []
    for event in events:
        for place, (text, source) in enumerate(event["tokens"], event["first"]):
            if place == len(tokens):
                tokens.append(["", source])
            tokens[place][0] += text
    assert "".join(text for text, _ in tokens) == expected
    assert last["end"]["tokens"] == len(tokens) == TOKENS
    passes = [one for event in events for one in event.get("passes", ())]
    ranges = [range(one["start"], one["start"] + one["tokens"]) for one in passes]
    covered = [place for places in ranges for place in places]
    assert covered == list(range(1, TOKENS))
    assert any(one["match"] and one["tree"]["ids"] for one in passes)
    assert {source for _, source in tokens} & {"guess", "prompt", "output"}


def test_guesses_in_a_chat_are_not_part_of_the_message(server: Server) -> None:
    """The events of a chat with a guess are those of the chat without it."""
    client = Client(server.url)
    texts = [
        "".join(event.get("text", "") for event in ask(client, Question(message, speculate=False)))
        for message in ("Say hello.", "Say hello.<NGRAMGUESS>Hello there</NGRAMGUESS>")
    ]
    assert texts[0] == texts[1] != ""


def test_the_page_shows_an_answer_with_and_without_speculation(
    server: Server, tmp_path: Path
) -> None:
    raw = {"text": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": TOKENS}}
    expected = server.post("/generate", raw)["text"]
    with chromium(tmp_path) as driver, shown(server.url) as show:
        page = Page(driver).open(show.url)
        page.named("chat").click()
        page.named("tokens").clear()
        page.named("tokens").send_keys(str(TOKENS))
        page.ask(PROMPT, compare=True)
        assert not page.one(".error").is_displayed()
        assert page.text(".view .tokens") == expected
        assert "The texts are identical." in page.text(".ratio")
        page.point_at(page.all(".token[data-index]")[TOKENS - 1])
        page.until(lambda: page.all(".details h3"))
        assert page.text(".details h3").startswith("Pass ")
        assert page.complaints() == []
