"""The trace of an answer's passes, from a running server."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.awaiting import held
from test.engine.server.running import GREEDY, generate
from test.engine.server.traces import BOTH, NARROW, TRACED, body_of, check_trace

pytestmark = pytest.mark.server


def test_the_passes_of_a_batch_agree_with_its_tokens_and_labels(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    answers = server.post("/generate", body_of(prompts))
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    passes = [one for answer in answers for one in check_trace(answer)]
    # Two slots: a request is alone only where its neighbour ended earlier.
    assert {2} <= {one["batch_requests"] for one in passes} <= {1, 2}
    assert any(len(one["tree"]["ids"]) > 2 for one in passes)


def test_texts_are_those_of_the_single_tokens_and_of_the_context(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    custom = {"qspec_guess_ids": expected[0]["output_ids"], "qspec_sources": ["guess"]}
    answer = generate(server, prompts[0], custom_params={**BOTH, **custom})
    drafted = [one for one in check_trace(answer) if one["tree"]["ids"]]
    assert drafted
    for one in drafted:
        assert one["batch_requests"] == 1
        ids, texts = one["tree"]["ids"], one["tree"]["texts"]
        assert texts == [server.post("/detokenize", {"tokens": [i]})["text"] for i in ids]
        before = server.post("/detokenize", {"tokens": answer["output_ids"][: one["start"]]})
        assert (prompts[0] + before["text"]).endswith(one["match"]["text"])
        # The output follows the guess; the match includes the last token of the prompt.
        assert one["match"]["length"] == min(1 + one["start"], 32)


def test_a_stop_in_the_middle_of_an_accepted_run_shortens_the_last_pass(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    ids = expected[2]["output_ids"]
    custom = {"qspec_guess_ids": ids, "qspec_sources": ["guess"]}
    for given in (
        {"max_new_tokens": 1},
        {"max_new_tokens": 4},
        {"stop_token_ids": [ids[5]]},
        {"stop": [server.post("/detokenize", {"tokens": [ids[7]]})["text"]]},
    ):
        answer = server.post("/generate", body_of(prompts[2], custom_params=custom, **given))
        assert answer["output_ids"] == ids[: len(answer["output_ids"])]
        passes = check_trace(answer)
        assert bool(passes) == (given != {"max_new_tokens": 1})


def test_the_last_piece_of_a_stream_has_all_passes(server: Server, prompts: list[str]) -> None:
    for interval in (1, 7):
        asked = body_of(prompts[3], stream_interval=interval, custom_params=NARROW)
        *pieces, last = server.stream("/generate", {**asked, "stream": True})
        assert check_trace(last)
        assert len(pieces) > 1
        assert not any("qspec_trace" in piece["meta_info"] for piece in pieces)


def test_sampled_and_constrained_answers_have_traces(server: Server, prompts: list[str]) -> None:
    sampling = {"n": 2, "temperature": 1.0, "max_new_tokens": 16}
    answers = server.post("/generate", body_of(prompts[4], **sampling))
    assert len(answers) == 2
    answers.append(server.post("/generate", body_of(prompts[4], regex="[a-d ]{40}")))
    for answer in answers:
        assert check_trace(answer)


def test_a_request_without_drafts_has_passes_of_one_row(server: Server, prompts: list[str]) -> None:
    body = body_of(prompts[0], max_new_tokens=6, custom_params={"qspec_enabled": False})
    passes = check_trace(server.post("/generate", body))
    assert [(one["rows"], one["match"]) for one in passes] == [(1, None)] * 5


def test_an_aborted_answer_has_the_passes_up_to_its_end(server: Server, prompts: list[str]) -> None:
    body = body_of(prompts[1], max_new_tokens=1000, ignore_eos=True)
    stream = server.stream("/generate", {**body, "rid": "ends-early", "stream": True})
    with ThreadPoolExecutor(1) as pool:
        with held(server) as target:
            asked = pool.submit(list, stream)
            target.run(4)
            server.post("/abort_request", {"rid": "ends-early"})
        pieces = asked.result()
    assert pieces[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert check_trace(pieces[-1])


def test_only_requests_that_ask_get_a_trace(server: Server, prompts: list[str]) -> None:
    params = [{**GREEDY, "custom_params": custom} for custom in (TRACED, {}, None)]
    body = {"text": prompts[:3], "sampling_params": params}
    answers = server.post("/generate", body)
    assert ["qspec_trace" in answer["meta_info"] for answer in answers] == [True, False, False]
    assert not any("qspec_provenance" in answer["meta_info"] for answer in answers)
    with ThreadPoolExecutor(2) as pool:  # in one batch, as streams
        streams = [
            pool.submit(list, server.stream("/generate", {**own, "stream": True}))
            for own in (body_of(prompts[0]), {"text": prompts[1], "sampling_params": GREEDY})
        ]
        traced, silent = (stream.result() for stream in streams)
    assert "qspec_trace" in traced[-1]["meta_info"]
    assert not any("qspec_trace" in piece["meta_info"] for piece in silent)


def test_a_chat_returns_the_trace_in_its_meta_info(server: Server) -> None:
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 8,
        "temperature": 0,
        "return_meta_info": True,
        "custom_params": TRACED,
    }
    answer = server.post("/v1/chat/completions", chat)
    trace = answer["choices"][0]["meta_info"]["qspec_trace"]
    tokens = sum(one["tokens"] for one in trace["passes"])
    assert tokens == answer["usage"]["completion_tokens"] - 1


def test_anything_but_true_or_false_is_a_400(server: Server) -> None:
    for wrong in (1, "yes", None):
        with pytest.raises(ServerError, match="HTTP 400.*qspec_return_trace.*true or false"):
            generate(server, "Hello", custom_params={"qspec_return_trace": wrong})
