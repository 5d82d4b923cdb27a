"""What SGLang's router sends to the servers behind it. The servers only record requests.

docs/deployment.md has a table of these facts. If a test fails after an upgrade of the router,
change the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from test.deployment.recording_server import MODEL, RecordingServer
from test.deployment.router import Router
from test.engine.server.running import until

CUSTOM = {"qspec_guesses": ["sea"], "qspec_return_provenance": True}
TAGGED = "The sea <NGRAMGUESS>was calm</NGRAMGUESS>"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TAGGED}]}
FAILURES = 40
"""More answers of HTTP 400 than the circuit breakers of both servers count before they open."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RecordingServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RecordingServer()) for _ in range(2)]


@pytest.fixture(scope="module")
def router(servers: list[RecordingServer]) -> Iterator[Router]:
    urls = [server.url for server in servers]
    with Router(urls, "--disable-circuit-breaker", "--balance-abs-threshold", "4") as running:
        yield running


@pytest.fixture(autouse=True)
def _forget(servers: list[RecordingServer]) -> None:
    for server in servers:
        server.bodies.clear()
        server.status, server.delay = 200, 0.0


def arrived(
    servers: list[RecordingServer], router: Router, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    """What reaches a server of a request that is sent to the router."""
    assert router.post(path, body).status_code == 200, router.log
    ((found,),) = [server.bodies for server in servers if server.bodies]
    return found


def test_tags_reach_the_server(servers: list[RecordingServer], router: Router) -> None:
    assert arrived(servers, router, "/v1/chat/completions", CHAT)["messages"] == CHAT["messages"]


def test_generate_loses_custom_params_and_keeps_the_sampling_seed(
    servers: list[RecordingServer], router: Router
) -> None:
    sampling = {"temperature": 0.5, "sampling_seed": 7, "custom_params": CUSTOM}
    body = arrived(servers, router, "/generate", {"text": TAGGED, "sampling_params": sampling})
    assert body["text"] == TAGGED
    assert body["sampling_params"] == {"temperature": 0.5, "sampling_seed": 7}


def test_completions_keep_custom_params(servers: list[RecordingServer], router: Router) -> None:
    sent = {"model": MODEL, "prompt": TAGGED, "custom_params": CUSTOM}
    body = arrived(servers, router, "/v1/completions", sent)
    assert (body["prompt"], body["custom_params"]) == (TAGGED, CUSTOM)


def test_chats_lose_custom_params_and_return_meta_info(
    servers: list[RecordingServer], router: Router
) -> None:
    sent = {**CHAT, "custom_params": CUSTOM, "return_meta_info": True}
    body = arrived(servers, router, "/v1/chat/completions", sent)
    assert not {"custom_params", "return_meta_info"} & body.keys()


def test_generate_takes_no_list_of_prompts(router: Router) -> None:
    assert router.post("/generate", {"text": ["one", "two"]}).status_code == 422


@pytest.mark.parametrize("path", ["/server_info", "/metrics"])
def test_the_router_does_not_pass_the_state_of_a_server(router: Router, path: str) -> None:
    assert router.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/set_internal_state"])
def test_the_router_does_not_know_an_endpoint_of_the_server(router: Router, path: str) -> None:
    assert router.post(path, CHAT).status_code == 404


def test_equal_beginnings_go_to_one_server(servers: list[RecordingServer], router: Router) -> None:
    for number in range(6):
        router.post("/generate", {"text": f"The same long beginning of all prompts, and {number}"})
    assert sorted(len(server.bodies) for server in servers) == [0, 6]


def test_requests_in_flight_spread_over_the_servers(
    servers: list[RecordingServer], router: Router
) -> None:
    """By default the router tolerates 64 more requests at one server than at another."""
    for server in servers:
        server.delay = 0.3
    prompts = [f"{number} sheep" for number in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda text: router.post("/generate", {"text": text}), prompts))
    assert min(len(server.bodies) for server in servers) >= 4


def refuse(servers: list[RecordingServer], router: Router) -> list[int]:
    """The statuses of answers to FAILURES requests that the servers refuse."""
    for server in servers:
        server.status = 400
    return [router.post("/generate", {"text": str(n)}).status_code for n in range(FAILURES)]


def test_without_a_circuit_breaker_refused_requests_harm_no_other(
    servers: list[RecordingServer], router: Router
) -> None:
    assert set(refuse(servers, router)) == {400}
    for server in servers:
        server.status = 200
    assert router.post("/generate", {"text": "right"}).status_code == 200


def test_with_a_circuit_breaker_one_client_can_shut_out_all(
    servers: list[RecordingServer],
) -> None:
    """The router counts HTTP 400 as a failure of the server."""
    with Router([server.url for server in servers]) as router:
        assert refuse(servers, router)[-1] == 503
        for server in servers:
            server.status = 200
        answer: httpx.Response = router.post("/generate", {"text": "right"})
        assert answer.status_code == 503


def test_a_server_without_health_gets_no_more_requests() -> None:
    with RecordingServer() as one, RecordingServer() as other:
        flags = ("--health-check-interval-secs", "1", "--health-failure-threshold", "2")
        with Router([one.url, other.url], "--disable-circuit-breaker", *flags) as router:
            prompt = {"text": "The same prompt, which would always go to the same server"}
            router.post("/generate", prompt)
            sick, well = (one, other) if one.bodies else (other, one)
            sick.is_healthy = False
            until(lambda: router.post("/generate", prompt).status_code == 200 and well.bodies)
