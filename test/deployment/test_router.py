"""SGLang's router in front of two QSPEC servers that share one sidecar.

Target and draft model are the same small model with random weights.
`test_router_protocol` has what the router drops.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.speculation import state_of
from sglang_qspec.link import PrivateEndpoint
from sglang_qspec.tools.models import DemoModels
from test.deployment.router import Router
from test.engine.awaiting import awaiting
from test.engine.server.running import COMMON, GREEDY, generate, of_sidecar, until
from test.preloaded.server import Server
from test.random_llama import write_random_llama

# Three processes that load a model start at once, which takes over a minute on two cores.
pytestmark = [pytest.mark.server, pytest.mark.thorough]

PROMPTS = [
    "The sea was calm, and the boats went out. The sea was calm, and the boats",
    "List the months of the year: January, February, March",
    "What is the capital of Norway?",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
]
VARIED = {"frequency_penalty": 1.5}
"""Without it a model of random weights soon repeats one token."""
ASKED = {"qspec_return_provenance": True}
KEY = "b3c1f0"
TAG = "<NGRAMGUESS>{}</NGRAMGUESS>"


@pytest.fixture(scope="module")
def servers(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    model = write_random_llama(
        tmp_path_factory.mktemp("fleet"),
        models,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    with ExitStack() as stack:
        endpoint = stack.enter_context(PrivateEndpoint()).address
        start_sidecar(stack, model, endpoint)
        arguments = [*COMMON, "--speculative-algorithm", "QSPEC"]
        arguments += ["--speculative-qspec-endpoint", endpoint, "--admin-api-key", KEY]
        environment = awaiting(tmp_path_factory.mktemp("plugin"))
        found = [Server(model, arguments, environment=environment) for _ in range(2)]
        for server in found:
            stack.callback(server.stop)
            server.launch()
        for server in found:
            server.start()
        until(lambda: {state_of(server)["sidecar"] for server in found} == {"ready"})
        yield found


def start_sidecar(stack: ExitStack, model: Path, endpoint: str) -> None:
    """Start a sidecar that ends with `stack`."""
    command = [sys.executable, "-m", "sglang_qspec", "sidecar", "--model-path", str(model)]
    command += ["--endpoint", endpoint, "--device", "cpu"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


@pytest.fixture(scope="module")
def router(servers: list[Server]) -> Iterator[Router]:
    with Router([server.url for server in servers], "--disable-circuit-breaker") as running:
        yield running


@pytest.fixture(scope="module")
def expected(servers: list[Server]) -> list[list[int]]:
    """Output ids of the first server without speculation."""
    off = {**VARIED, "custom_params": {"qspec_enabled": False}}
    answers = [generate(servers[0], text, **off)["output_ids"] for text in PROMPTS]
    assert max(len(set(answer)) for answer in answers) > 10
    return answers


def ask(router: Router, text: str, **more: Any) -> dict[str, Any]:
    """An answer of /generate through the router."""
    sampling = {**GREEDY, **VARIED, **more}
    response = router.post("/generate", {"text": text, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def proposed(server: Server) -> int:
    """Tokens that the sidecar drafted and this server verified.

    Few of them are right: the penalty decides many tokens, and the sidecar drafts without it.
    """
    return of_sidecar(state_of(server)["proposed_tokens"])


def test_answers_through_the_router_equal_those_without_speculation(
    router: Router, servers: list[Server], expected: list[list[int]]
) -> None:
    before = sum(map(proposed, servers))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda text: ask(router, text), PROMPTS))
    assert [answer["output_ids"] for answer in answers] == expected
    assert all(answer["meta_info"]["qspec"]["passes"] > 0 for answer in answers)
    assert sum(map(proposed, servers)) > before


def answers_of(server: Server) -> list[list[int]]:
    """The output ids of one server for all prompts at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda text: generate(server, text, **VARIED), PROMPTS)
        return [answer["output_ids"] for answer in answers]


def test_the_sidecar_drafts_for_both_servers(
    servers: list[Server], expected: list[list[int]]
) -> None:
    for server in servers:
        before = proposed(server)
        assert answers_of(server) == expected
        assert proposed(server) > before
        assert not state_of(server)["failed"], server.log[-4000:]


def test_a_tagged_guess_passes(
    router: Router, servers: list[Server], expected: list[list[int]]
) -> None:
    guess = servers[0].post("/detokenize", {"tokens": expected[1]})["text"]
    answer = ask(router, PROMPTS[1] + TAG.format(guess))
    assert answer["output_ids"] == expected[1]
    assert answer["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0


def test_a_wrong_tag_is_a_400(router: Router) -> None:
    response = router.post("/generate", {"text": "<NGRAMGUESS> a", "sampling_params": GREEDY})
    assert response.status_code == 400
    assert "never closed" in response.text


def test_a_client_changes_nothing_at_a_server_and_does_not_see_its_key(
    router: Router, servers: list[Server]
) -> None:
    """The router passes a path in the place of an answer's id (`test_takeover`)."""
    for method, path in (("GET", "flush_cache"), ("POST", "pause_generation%23/cancel")):
        answer = router.ask(method, f"/v1/responses/..%2F..%2F{path}")
        assert (answer.status_code, answer.text) == (401, '{"error":"Unauthorized"}')
    shown = router.get("/v1/responses/..%2F..%2Fserver_info")
    assert shown.json()["internal_states"][0]["admin_api_key"] == "<redacted>"
    assert "--admin-api-key <redacted>" in shown.json()["launch_command"]
    assert KEY not in shown.text
    assert servers[0].get("/server_info")["admin_api_key"] == "<redacted>"


def test_options_have_no_effect_in_generate(router: Router) -> None:
    """The router drops them, so the server cannot refuse a wrong one."""
    answer = ask(router, PROMPTS[0], custom_params={**ASKED, "qspec_sources": "nowhere"})
    assert "qspec_provenance" not in answer["meta_info"]


def test_a_wrong_option_is_a_400_in_completions(router: Router) -> None:
    body = {"model": "m", "prompt": "a", "custom_params": {"qspec_return_provenance": 1}}
    response = router.post("/v1/completions", body)
    assert response.status_code == 400
    assert "qspec_return_provenance in custom_params is 1" in response.text


def test_a_stream_passes(router: Router, expected: list[list[int]]) -> None:
    body = {"text": PROMPTS[3], "sampling_params": {**GREEDY, **VARIED}, "stream": True}
    response = router.post("/generate", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *_, last, end = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert end == "data: [DONE]"
    assert '"qspec":' in last
    assert str(expected[3]).replace(" ", "") in last.replace(" ", "")
