"""The label of each output token, its draft source or `target`, from a running server."""

from collections import Counter
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.server.running import GREEDY, generate, tagged
from test.engine.server.traces import NARROW

pytestmark = pytest.mark.server

ASKED = {"custom_params": {"qspec_return_provenance": True}}


def check(answer: dict[str, Any]) -> list[str]:
    """Fail unless the labels agree with the tokens and the counts. Returns the labels."""
    meta = answer["meta_info"]
    labels: list[str] = meta["qspec_provenance"]
    assert len(labels) == len(answer["output_ids"]) == meta["completion_tokens"]
    counted = Counter(labels)
    own, record = counted.pop("target"), meta["qspec"]
    assert counted == {source: n for source, n in record["accepted_by_source"].items() if n}
    # Prefill gave one token; the last pass may have ended the answer before its own token.
    assert own in (record["passes"], record["passes"] + 1)
    assert record["accept_length"] == pytest.approx((len(labels) - 1) / record["passes"])
    assert labels[0] == "target"
    return labels


def test_every_token_of_a_batch_has_a_label(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    body = {"text": prompts, "sampling_params": {**GREEDY, **ASKED}}
    answers = server.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    drafted = Counter(label for answer in answers for label in check(answer))
    assert drafted["queue"] + drafted["step"] > drafted["target"] / 4


def test_tokens_of_a_guess_are_marked_as_guessed(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    custom = {**ASKED["custom_params"], "qspec_sources": ["guess"]}
    answer = generate(server, tagged(prompts[1], expected[1]["text"]), custom_params=custom)
    labels = check(answer)
    assert set(labels) == {"guess", "target"}
    assert labels.count("guess") > len(labels) / 2
    nothing = generate(server, tagged(prompts[1], "zebra zebra"), custom_params=custom)
    assert set(check(nothing)) == {"target"}


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": n} for n in (1, 3, 5, 7)] + [{"at": n} for n in (3, 10)]
)
def test_the_list_ends_where_the_answer_ends_in_the_middle_of_an_accepted_run(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], limit: dict[str, int]
) -> None:
    """The end is a length, a stop token or a stop string; the whole answer is a draft."""
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


def test_each_piece_of_a_stream_labels_all_tokens_so_far(
    server: Server, prompts: list[str]
) -> None:
    custom = {"custom_params": {**ASKED["custom_params"], **NARROW}}
    body = {"text": prompts[3], "sampling_params": {**GREEDY, **custom}, "stream": True}
    before: list[str] = []
    pieces = list(server.stream("/generate", body))
    for piece in pieces:
        labels = piece["meta_info"]["qspec_provenance"]
        assert len(labels) == len(piece["output_ids"]) == piece["meta_info"]["completion_tokens"]
        assert labels[: len(before)] == before
        before = labels
    assert len(pieces) > 2
    check(pieces[-1])


def test_each_of_several_answers_has_a_list_of_its_own(server: Server, prompts: list[str]) -> None:
    sampling = {**GREEDY, **ASKED, "n": 2, "temperature": 1.0, "max_new_tokens": 16}
    answers = server.post("/generate", {"text": prompts[4], "sampling_params": sampling})
    assert len(answers) == 2
    for answer in answers:
        check(answer)


def test_only_requests_that_ask_get_labels(server: Server, prompts: list[str]) -> None:
    short = {**GREEDY, "max_new_tokens": 12}
    off = {"qspec_return_provenance": True, "qspec_enabled": False}
    params = [short, {**short, **ASKED}, {**short, "custom_params": off}]
    silent, asking, plain = server.post(
        "/generate", {"text": prompts[:3], "sampling_params": params}
    )
    assert "qspec_provenance" not in silent["meta_info"]
    check(asking)
    assert plain["meta_info"]["qspec_provenance"] == ["target"] * 12
    # Also in one batch and as streams.
    body = {"text": prompts[:2], "sampling_params": params[:2], "stream": True}
    for piece in server.stream("/generate", body):
        assert ("qspec_provenance" in piece["meta_info"]) == (piece["index"] == 1)
        finished = piece["meta_info"]["finish_reason"] is not None
        assert ("qspec" in piece["meta_info"]) == finished


def test_a_chat_returns_labels_in_its_meta_info(server: Server) -> None:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 8,
        "temperature": 0,
        "return_meta_info": True,
        **ASKED,
    }
    answer = server.post("/v1/chat/completions", chat)
    labels = answer["choices"][0]["meta_info"]["qspec_provenance"]
    assert len(labels) == answer["usage"]["completion_tokens"]


def test_anything_but_true_or_false_is_a_400(server: Server) -> None:
    with pytest.raises(ServerError, match="HTTP 400.*qspec_return_provenance.*true or false"):
        generate(server, "Hello", custom_params={"qspec_return_provenance": 1})
