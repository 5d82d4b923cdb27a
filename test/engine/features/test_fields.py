"""Odd fields at every endpoint: the server lives, speculates, and answers as before."""

import dataclasses
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    ScoringRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from benchmark.harness.server import ServerError
from sglang_qspec.tools.models import DemoModels
from test.engine.features.asking import TEXT, guessing
from test.engine.server.running import QSPEC, ask, generate, state, until
from test.preloaded.server import Server
from test.random_llama import write_random_llama

pytestmark = pytest.mark.server

VOCAB = 49152
SAMPLING = tuple(field.name for field in msgspec.structs.fields(SamplingParams))
OPTIONS = ("temperature", "top_p", "top_k", "num_predict", "stop", "seed", "custom_params")
MESSAGES = [{"role": "user", "content": "Name three colours."}]
ENDPOINTS: dict[str, tuple[dict[str, Any], tuple[str, ...], str | None, tuple[str, ...]]] = {
    path: (body, tuple(names), inner, within)
    for path, body, names, inner, within in (
        (
            "/generate",
            {"text": TEXT, "sampling_params": {"max_new_tokens": 3}},
            [field.name for field in dataclasses.fields(GenerateReqInput)],
            "sampling_params",
            SAMPLING,
        ),
        (
            "/v1/completions",
            {"model": "m", "prompt": TEXT, "max_tokens": 3},
            CompletionRequest.model_fields,
            None,
            (),
        ),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": MESSAGES, "max_tokens": 3},
            ChatCompletionRequest.model_fields,
            None,
            (),
        ),
        (
            "/v1/messages",
            {"model": "m", "messages": MESSAGES, "max_tokens": 3},
            AnthropicMessagesRequest.model_fields,
            None,
            (),
        ),
        (
            "/v1/responses",
            {"model": "m", "input": TEXT, "max_output_tokens": 5, "store": False},
            ResponsesRequest.model_fields,
            None,
            (),
        ),
        (
            "/api/chat",
            {"model": "m", "messages": MESSAGES, "stream": False, "options": {"num_predict": 3}},
            OllamaChatRequest.model_fields,
            "options",
            OPTIONS,
        ),
        (
            "/api/generate",
            {"model": "m", "prompt": TEXT, "stream": False, "options": {"num_predict": 3}},
            OllamaGenerateRequest.model_fields,
            "options",
            OPTIONS,
        ),
        (
            "/v1/score",
            {"model": "m", "query": "A", "items": ["b", "c"], "label_token_ids": [5, 6]},
            ScoringRequest.model_fields,
            None,
            (),
        ),
    )
}
"""Each endpoint's smallest request, its fields, and the name and fields of an inner object."""


def nested(depth: int, value: object = 1) -> object:
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 5, 64, 0.5, 3.7, -0.5, 1e-300, 1e39, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *(VOCAB - 1, VOCAB, VOCAB + 1, 60_000, 10**6),
    *(sign * (1 << bits) + more for bits in (31, 32, 40, 63, 64, 70) for sign in (1, -1)
      for more in (-1, 0)),
    *("", "x", "5", "null", "é東\u0000", "\ud800", "a" * 10_000, "(", "[ab]+", "root ::= root"),
    *('{"type": "object"}', '{"type": "array", "minItems": 1000000000}', "HEALTH_CHECK"),
    *([], [0], [5, 6], [-1], [VOCAB], [1 << 40], [[1]], [[5], []], [[]], ["a"], [None], ["", "b"]),
    *({}, {"a": 1}, {"5": 1.0}, {"5": -1e30}, {"49152": 1}, {"5": float("nan")}, {"é": [1, [2]]}),
    *({"qspec_guess_ids": [[5, 6]]}, {"qspec_enabled": 5}, {"type": "json_object"}),
    *(nested(50), nested(900), {"a": nested(900)}),
]  # fmt: skip
BROKEN = ["[" * 100_000, '{"text": ' * 50_000, "9" * 6_000, '{"text": "\ud800"}', "{", ""]


def request(rng: random.Random) -> tuple[str, str]:
    """The path and the body of a request with one to three odd fields."""
    path = rng.choice(list(ENDPOINTS))
    body, names, inner, within = ENDPOINTS[path]
    if rng.random() < 0.01:
        return path, rng.choice(BROKEN)
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice([1, 1, 2, 3])):
        value = rng.choice(VALUES)
        if inner and isinstance(body.get(inner), dict) and rng.random() < 0.7:
            body[inner][rng.choice(within)] = value
        else:
            body[rng.choice(names)] = value
    return path, json.dumps(body)


def control(server: Server) -> dict[str, Any]:
    """A greedy answer with accepted drafts, which equals the answer without guesses."""
    plain = generate(server, TEXT, max_new_tokens=12)
    answer = generate(server, TEXT, max_new_tokens=12, custom_params=guessing(plain["output_ids"]))
    assert answer["output_ids"] == plain["output_ids"]
    assert answer["meta_info"]["qspec"]["accepted_tokens"] > 0
    return answer


def ask_odd(server: Server, count: int, seed: int) -> dict[int, int]:
    """Send that many requests, eight at once. Returns the numbers of answers by status code."""
    rng = random.Random(seed)
    requests = [request(rng) for _ in range(count)]
    headers = {"Content-Type": "application/json"}
    codes: dict[int, int] = {}
    before = control(server)
    # After an error of its own SGLang closes the connection, which another request could reuse.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False, limits=limits) as client:

        def ask(asked: tuple[str, str]) -> int:
            path, body = asked
            try:
                content = body.encode("utf-8", "surrogatepass")
                return client.post(path, content=content, headers=headers).status_code
            except httpx.HTTPError as error:
                if isinstance(error, httpx.RemoteProtocolError) and path.startswith("/api/"):
                    return 0  # SGLang closes the connection of an Ollama stream that fails
                raise AssertionError(f"{path} {body[:2000]}: {error!r}") from error

        with ThreadPoolExecutor(8) as pool:
            for code in pool.map(ask, requests):
                codes[code] = codes.get(code, 0) + 1
    until(lambda: state(server)["live_requests"] == 0)
    assert not state(server)["failed"]
    after = control(server)
    assert (after["output_ids"], after["text"]) == (before["output_ids"], before["text"])
    return codes


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"return_sampling_mask": True}, "return_sampling_mask is not supported with speculative"),
        ({"sampling_params": {"beam_width": 2}}, "Beam search is not supported with speculative"),
    ],
    ids=["mask", "beams"],
)
def test_what_sglang_has_without_speculation_alone_is_a_400(
    server: Server, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ServerError, match=f"HTTP 400.*{words}"):
        ask(server, {"text": TEXT, **body}, max_new_tokens=3)
    assert generate(server, TEXT, max_new_tokens=3)["meta_info"]["completion_tokens"] == 3


def test_the_server_survives_odd_fields(server: Server) -> None:
    codes = ask_odd(server, 200, seed=1)
    assert codes[200] > 5  # most values are not allowed in most fields
    assert codes[400] > 50


@pytest.fixture
def small(models: DemoModels, tmp_path: Path) -> Path:
    return write_random_llama(
        tmp_path / "target",
        models,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.mark.thorough
@pytest.mark.timeout(7200)
def test_a_server_survives_ten_thousand_odd_requests(small: Path) -> None:
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "8"),
        *("--max-total-tokens", "8192", "--context-length", "256", "--log-level", "warning"),
        *("--sleep-on-idle", "--enable-metrics", "--enable-priority-scheduling"),
        *(*QSPEC, "--speculative-draft-model-path", str(small)),
    ]
    with Server(small, arguments) as server:
        until(lambda: state(server)["sidecar"] == "ready")
        codes = ask_odd(server, 10_000, seed=2)
    assert codes[200] > 200
    assert codes[400] > 3000
