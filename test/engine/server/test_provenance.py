"""Whose each output token is, as a running server tells it."""

from collections import Counter
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.server.running import GREEDY, generate, tagged

pytestmark = pytest.mark.server

ASKED = {"custom_params": {"qspec_return_provenance": True}}


def check(answer: dict[str, Any]) -> list[str]:
    """One word for each token, as many of each as the record counts; returns the words."""
    meta = answer["meta_info"]
    words: list[str] = meta["qspec_provenance"]
    assert len(words) == len(answer["output_ids"]) == meta["completion_tokens"]
    counted = Counter(words)
    own, record = counted.pop("target"), meta["qspec"]
    assert counted == {source: n for source, n in record["accepted_by_source"].items() if n}
    # The prompt's pass gave one, and the last pass may have run over the end before its own.
    assert own in (record["passes"], record["passes"] + 1)
    assert record["accept_length"] == pytest.approx((len(words) - 1) / record["passes"])
    assert words[0] == "target"
    return words


def test_every_token_of_a_batch_is_accounted_for(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    body = {"text": prompts, "sampling_params": {**GREEDY, **ASKED}}
    answers = server.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    drafted = Counter(word for answer in answers for word in check(answer))
    assert drafted["queue"] + drafted["step"] > drafted["target"] / 4


def test_tokens_of_a_guess_are_marked_as_guessed(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    custom = {**ASKED["custom_params"], "qspec_sources": ["guess"]}
    answer = generate(server, tagged(prompts[1], expected[1]["text"]), custom_params=custom)
    words = check(answer)
    assert set(words) == {"guess", "target"}
    assert words.count("guess") > len(words) / 2
    nothing = generate(server, tagged(prompts[1], "zebra zebra"), custom_params=custom)
    assert set(check(nothing)) == {"target"}


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": n} for n in (1, 3, 5, 7)] + [{"at": n} for n in (3, 10)]
)
def test_the_list_ends_where_the_answer_ends_in_the_middle_of_an_accepted_run(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], limit: dict[str, int]
) -> None:
    """By length, by a stop token and by a stop string, with the whole answer as a draft."""
    ids = expected[2]["output_ids"]
    custom = {**ASKED["custom_params"], "qspec_guess_ids": ids, "qspec_sources": ["guess"]}
    if "at" not in limit:
        limits: list[dict[str, Any]] = [limit]
    else:
        stop = ids[limit["at"]]
        text = server.post("/detokenize", {"tokens": [stop]})["text"]
        limits = [{"stop_token_ids": [stop]}, {"stop": [text]}]
    for given in limits:
        answer = generate(server, prompts[2], custom_params=custom, **given)
        size = answer["meta_info"]["completion_tokens"]
        if limit.get("max_new_tokens") == 1:  # nothing is drafted for it
            assert answer["meta_info"]["qspec_provenance"] == ["target"]
            continue
        assert 1 < size < len(ids)
        assert answer["output_ids"] == ids[:size]
        assert set(check(answer)[1:]) >= {"guess"}


def test_a_stream_tells_of_all_tokens_so_far(server: Server, prompts: list[str]) -> None:
    body = {"text": prompts[3], "sampling_params": {**GREEDY, **ASKED}, "stream": True}
    before: list[str] = []
    pieces = list(server.stream("/generate", body))
    for piece in pieces:
        words = piece["meta_info"]["qspec_provenance"]
        assert len(words) == len(piece["output_ids"]) == piece["meta_info"]["completion_tokens"]
        assert words[: len(before)] == before
        before = words
    assert len(pieces) > 2
    check(pieces[-1])


def test_each_of_several_answers_has_a_list_of_its_own(server: Server, prompts: list[str]) -> None:
    sampling = {**GREEDY, **ASKED, "n": 2, "temperature": 1.0, "max_new_tokens": 16}
    answers = server.post("/generate", {"text": prompts[4], "sampling_params": sampling})
    assert len(answers) == 2
    for answer in answers:
        check(answer)


def test_only_requests_that_ask_are_told(server: Server, prompts: list[str]) -> None:
    short = {**GREEDY, "max_new_tokens": 12}
    off = {"qspec_return_provenance": True, "qspec_enabled": False}
    params = [short, {**short, **ASKED}, {**short, "custom_params": off}]
    silent, told, plain = server.post("/generate", {"text": prompts[:3], "sampling_params": params})
    assert "qspec_provenance" not in silent["meta_info"]
    check(told)
    assert plain["meta_info"]["qspec_provenance"] == ["target"] * 12
    # And while they are served beside each other.
    body = {"text": prompts[:2], "sampling_params": params[:2], "stream": True}
    for piece in server.stream("/generate", body):
        assert ("qspec_provenance" in piece["meta_info"]) == (piece["index"] == 1)
        finished = piece["meta_info"]["finish_reason"] is not None
        assert ("qspec" in piece["meta_info"]) == finished


def test_a_chat_returns_it_with_its_meta_info(server: Server) -> None:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 8,
        "temperature": 0,
        "return_meta_info": True,
        **ASKED,
    }
    answer = server.post("/v1/chat/completions", chat)
    words = answer["choices"][0]["meta_info"]["qspec_provenance"]
    assert len(words) == answer["usage"]["completion_tokens"]


def test_anything_but_true_or_false_is_a_400(server: Server) -> None:
    with pytest.raises(ServerError, match="HTTP 400.*qspec_return_provenance.*true or false"):
        generate(server, "Hello", custom_params={"qspec_return_provenance": 1})
