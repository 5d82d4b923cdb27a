"""Pauses, retractions, priorities, aborts and new weights change no answer that completes."""

import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from benchmark.harness.server import Server
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import Held, held
from test.engine.features.asking import PLAIN, TEXT, ask, guessing
from test.engine.server.running import state, until

pytestmark = pytest.mark.server

LONG = {"max_new_tokens": 160, "ignore_eos": True}
TEXTS = [TEXT, "The old house at the end of the road", "One, two, three,", "A cat and a dog"]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """Output ids of long answers to TEXTS, without drafts."""
    answers = ask(server, {**LONG, "custom_params": PLAIN}, text=TEXTS)
    return [answer["output_ids"] for answer in answers]


def begin(server: Server, target: Held, pool: Executor, texts: list[str]) -> list[Future[Any]]:
    """Begin to answer `texts`; the first answers have tokens, and none is complete."""
    asked = [pool.submit(ask, server, LONG, text=text) for text in texts]
    until(lambda: state(server)["live_requests"] == len(texts))
    target.run(5)
    return asked


def passes(pipelines: dict[str, Any]) -> int:
    return sum(pipeline["passes"] for pipeline in pipelines.values())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_continue_to_the_same_answers(
    server: Server, expected: list[list[int]], mode: str
) -> None:
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        with held(server) as target:
            asked = begin(server, target, pool, TEXTS)
            server.post("/pause_generation", {"mode": mode})
            paused = passes(state(server)["pipelines"])
        assert passes(state(server)["pipelines"]) == paused
        assert not any(answer.done() for answer in asked)
        server.post("/continue_generation", {})
        assert [answer.result()["output_ids"] for answer in asked] == expected


def test_a_pause_may_abort_running_requests(server: Server, expected: list[list[int]]) -> None:
    texts = TEXTS * 2
    with ThreadPoolExecutor(len(texts) + 1) as pool:
        with held(server) as target:
            asked = begin(server, target, pool, texts)
            pausing = pool.submit(server.post, "/pause_generation", {"mode": "abort"})
            until(lambda: state(server)["waiting_requests"] == 0)  # those end at once
        pausing.result()
        server.post("/continue_generation", {})
        ends = {answer.result()["meta_info"]["finish_reason"]["type"] for answer in asked}
    assert ends == {"abort"}
    check_idle(server)
    assert ask(server, LONG, text=TEXTS[0])["output_ids"] == expected[0]


def check_idle(server: Server) -> None:
    """Wait until the server keeps nothing of ended requests."""
    until(lambda: state(server)["live_requests"] == state(server)["trie_tokens"] == 0)


def test_new_weights_drop_the_drafts_of_the_old_ones(
    server: Server, models: DemoModels, expected: list[list[int]]
) -> None:
    """The server loads the same weights during a request: the answer stays, the drafts go."""
    custom = guessing(expected[0])
    with ThreadPoolExecutor(1) as pool:
        with held(server) as target:
            asked = pool.submit(ask, server, {**LONG, "custom_params": custom}, text=TEXTS[0])
            target.run(3)
            server.post("/pause_generation", {"mode": "retract"})
            before = state(server)["trie_tokens"]
        result = server.post("/update_weights_from_disk", {"model_path": str(models.target)})
        assert result["success"], result
        assert state(server)["trie_tokens"] < before
        server.post("/continue_generation", {})
        answer = asked.result()
    assert answer["output_ids"] == expected[0]
    check_idle(server)


def test_retracted_requests_give_the_same_answers(
    server: Server, expected: list[list[int]]
) -> None:
    """Four answers that do not fit into the KV slots together, one with log probabilities."""
    bodies: list[dict[str, Any]] = [{}, {"return_logprob": True, "top_logprobs_num": 2}, {}, {}]
    for ragged in passes_of(server):
        set_ragged(server, ragged)
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            with held(server):
                asked = [
                    pool.submit(
                        ask,
                        server,
                        {**LONG, "custom_params": guessing(ids[9:])},
                        text=text,
                        **body,
                    )
                    for text, ids, body in zip(TEXTS, expected, bodies, strict=True)
                ]
                until(lambda: state(server)["live_requests"] == len(TEXTS))
            answers = [answer.result() for answer in asked]
        assert [answer["output_ids"] for answer in answers] == expected
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert len(answers[1]["meta_info"][name]) == len(expected[1])
        check_idle(server)
        retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
        assert any(retractions)


def passes_of(server: Server) -> tuple[bool, ...]:
    """Whether verify passes are ragged: both in turn, if the server can change it."""
    as_gpu = not server.get("/server_info")["disable_overlap_schedule"]
    return (False,) if as_gpu else (False, True)


def set_ragged(server: Server, on: bool) -> None:
    server.post("/set_internal_state", {"server_args": {"qspec_ragged": int(on)}})


def test_an_urgent_request_overtakes_others_and_no_answer_changes(
    server: Server, expected: list[list[int]]
) -> None:
    ended: list[str] = []

    def answer_of(name: str, text: str, priority: int) -> list[int]:
        answer: list[int] = ask(server, LONG, text=text, priority=priority)["output_ids"]
        ended.append(name)
        return answer

    with ThreadPoolExecutor(8) as pool:
        with held(server) as target:
            usual = [pool.submit(answer_of, "usual", TEXTS[n % 4], 0) for n in range(7)]
            until(lambda: state(server)["live_requests"] == 7)
            target.run(2)
            urgent = pool.submit(answer_of, "urgent", TEXTS[0], 9)
            until(lambda: state(server)["live_requests"] == 8)
        assert urgent.result() == expected[0]
        assert [answer.result() for answer in usual] == [expected[n % 4] for n in range(7)]
    assert ended[-1] != "urgent"


@pytest.mark.parametrize("grammar", [{}, {"regex": "([a-z]{3} ){200}"}], ids=["free", "grammar"])
def test_clients_that_go_away_leave_nothing_behind(
    server: Server, expected: list[list[int]], grammar: dict[str, Any]
) -> None:
    sampling = {"max_new_tokens": 200, **grammar, "custom_params": guessing(expected[0])}
    for hang_up in (True, False):
        for stream in (True, False):
            rid = f"gone-{hang_up}-{stream}-{len(grammar)}"
            until_gone(server, {"sampling_params": sampling, "rid": rid, "stream": stream}, hang_up)
    check_idle(server)
    assert ask(server, LONG, text=TEXTS[1])["output_ids"] == expected[1]


def until_gone(server: Server, body: dict[str, Any], hang_up: bool) -> None:
    """Send a request and end it midway, by its client or by /abort_request."""

    content = json.dumps({"text": TEXT, **body})
    with closing(HTTPConnection("127.0.0.1", server.port)) as client:
        with held(server) as target:
            client.request("POST", "/generate", content, {"Content-Type": "application/json"})
            target.run(3)
            if hang_up:
                client.close()
            else:
                server.post("/abort_request", {"rid": body["rid"]})
        if not hang_up:
            client.getresponse().read()
    until(lambda: state(server)["live_requests"] == 0)


def test_a_flush_empties_the_cache_and_changes_no_answer(
    server: Server, expected: list[list[int]]
) -> None:
    ask(server, LONG, text=TEXTS[2])
    again = ask(server, LONG, text=TEXTS[2])
    assert again["meta_info"]["cached_tokens"] > 0
    server.post("/flush_cache?timeout=60", {})
    fresh = ask(server, LONG, text=TEXTS[2])
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == again["output_ids"] == expected[2]
