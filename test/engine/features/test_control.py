"""Pauses, retractions, priorities, aborts and new weights change no answer that completes."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from sglang_qspec.models import DemoModels
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


@contextlib.contextmanager
def running(server: Server, **body: Any) -> Iterator[list[Future[Any]]]:
    """A context in which the server answers TEXTS; at least one answer has begun."""
    before = state(server)["pipelines"]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        asked = [pool.submit(ask, server, LONG, text=text, **body) for text in TEXTS]
        until(lambda: passes(state(server)["pipelines"]) > passes(before) + 3)
        yield asked


def passes(pipelines: dict[str, Any]) -> int:
    return sum(pipeline["passes"] for pipeline in pipelines.values())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_continue_to_the_same_answers(
    server: Server, expected: list[list[int]], mode: str
) -> None:
    with running(server) as asked:
        server.post("/pause_generation", {"mode": mode})
        paused = passes(state(server)["pipelines"])
        assert not all(answer.done() for answer in asked)
        assert passes(state(server)["pipelines"]) == paused
        server.post("/continue_generation", {})
        assert [answer.result()["output_ids"] for answer in asked] == expected


def test_a_pause_may_abort_running_requests(server: Server, expected: list[list[int]]) -> None:
    with running(server) as asked:
        server.post("/pause_generation", {"mode": "abort"})
        server.post("/continue_generation", {})
        ends = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in asked]
    assert "abort" in ends
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
        asked = pool.submit(ask, server, {**LONG, "custom_params": custom}, text=TEXTS[0])
        until(lambda: state(server)["trie_tokens"] > 0)
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
    for ragged in (False, True):
        set_ragged(server, ragged)
        with ThreadPoolExecutor(len(TEXTS)) as pool:
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
            answers = [answer.result() for answer in asked]
        assert [answer["output_ids"] for answer in answers] == expected
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert len(answers[1]["meta_info"][name]) == len(expected[1])
        check_idle(server)
        retractions = [answer["meta_info"]["num_retractions"] for answer in answers]
        assert any(retractions)


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
        usual = [pool.submit(answer_of, "usual", TEXTS[n % 4], 0) for n in range(7)]
        until(lambda: state(server)["live_requests"] == 7)
        urgent = pool.submit(answer_of, "urgent", TEXTS[0], 9)
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

    def wait() -> None:
        with contextlib.suppress(ServerError, OSError):
            timeout = 1.0 if hang_up else 60.0
            if body["stream"]:
                for number, _ in enumerate(server.stream("/generate", {"text": TEXT, **body})):
                    if hang_up and number > 2:
                        break
            else:
                server.post("/generate", {"text": TEXT, **body}, timeout=timeout)

    client = threading.Thread(target=wait)
    client.start()
    until(lambda: state(server)["live_requests"] > 0)
    if not hang_up:
        server.post("/abort_request", {"rid": body["rid"]})
    client.join(60)
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
