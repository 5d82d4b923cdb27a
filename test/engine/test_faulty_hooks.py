"""After an error in the plugin, a running server fails no request and gives no wrong answer.

A second plugin makes the server's hooks fail on demand, and the step between two passes that
commits tokens. The tests compare the answers with those that the same server gives without drafts.
With `--thorough` all tests also run on a server that passes as a GPU server does.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import ServerError
from benchmark.prompts import PROMPTS
from sglang_qspec.engine.boundary.hook import OnError
from sglang_qspec.engine.start import hooks
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import AWAIT
from test.engine.faulty import Faults
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import (
    COMMON,
    QSPEC,
    cores,
    generate,
    of_sidecar,
    sidecar_processes,
    state,
    tagged,
    until,
)
from test.preloaded.server import Server

pytestmark = pytest.mark.server

ROWS = {row.function.__name__: row for row in (*hooks.front(), *hooks.scheduler())}
TOKENS = {"max_new_tokens": 12}
QUESTION = "Name three colours."


@pytest.fixture(scope="module", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    more = GPU_SHAPE if request.param == "gpu" else ""
    return Faults(tmp_path_factory.mktemp("faulty"), AWAIT + more)


@pytest.fixture(scope="module")
def server(models: DemoModels, faults: Faults) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0]), "--enable-metrics"),
        *("--tool-call-parser", "pythonic"),  # with it, required calls come as JSON
    ]
    environment = faults.environment
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS[:3])


@pytest.fixture(scope="module")
def expected(server: Server, prompts: list[str]) -> list[list[int]]:
    """Output ids of plain decoding."""
    plain = {"qspec_enabled": False}
    return [generate(server, p, custom_params=plain, **TOKENS)["output_ids"] for p in prompts]


def chat(server: Server) -> str:
    message = {"role": "user", "content": QUESTION}
    body = {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 6}
    text: str = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def complete(server: Server) -> str:
    body = {"model": "m", "prompt": QUESTION, "temperature": 0, "max_tokens": 6}
    text: str = server.post("/v1/completions", body)["choices"][0]["text"]
    return text


def texts(value: object) -> list[object]:
    """All texts in a part of a decoded answer."""
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    if isinstance(value, dict):
        return [value["text"]] if "text" in value else texts(list(value.values()))
    return []


def ask_all(server: Server) -> dict[str, object]:
    """The answers of all text endpoints, without the fields that differ between answers."""
    model = server.get("/v1/models")["data"][0]["id"]
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    anthropic = {"model": model, "max_tokens": 6, "temperature": 0, **messages}
    responses = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 6}
    ollama = {"model": model, "stream": False, "options": {"temperature": 0, "num_predict": 6}}
    return {
        "/v1/chat/completions": chat(server),
        "/v1/completions": complete(server),
        "/v1/messages": server.post("/v1/messages", anthropic)["content"],
        "/v1/responses": texts(server.post("/v1/responses", responses)["output"]),
        "/api/chat": server.post("/api/chat", {**ollama, **messages})["message"]["content"],
        "/api/generate": server.post("/api/generate", {**ollama, "prompt": QUESTION})["response"],
        "tools": [stream_with_tools(server, choice) for choice in ("auto", "required")],
    }


def stream_with_tools(server: Server, choice: str) -> list[str]:
    """The text and the calls of a stream, in pieces of one token: longer ones need the hooks."""
    tool = {"type": "function", "function": {"name": "mix", "parameters": {"type": "object"}}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [tool],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 12,
        "stream": True,
        "custom_params": {"qspec_enabled": False},
    }
    deltas = [c["delta"] for p in server.stream("/v1/chat/completions", body) for c in p["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or ()]
    return [
        "".join(delta.get("content") or "" for delta in deltas),
        "".join((part["name"] or "") + part["arguments"] for part in parts),
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, object]:
    """The answers of all text endpoints without a fault."""
    return ask_all(server)


@contextmanager
def armed(
    server: Server,
    faults: Faults,
    hook: str,
    moment: str,
    prompts: list[str],
    expected: list[list[int]],
) -> Iterator[None]:
    """A context in which a hook fails; requests begin before, during and after it."""
    before = faults.met(hook)
    with ThreadPoolExecutor(len(prompts)) as pool:
        served = [pool.submit(generate, server, prompt, **TOKENS) for prompt in prompts]
        faults.arm(hook, moment)
        try:
            during = generate(server, prompts[0], **TOKENS)
            yield
            assert [answer.result()["output_ids"] for answer in served] == expected
        finally:
            faults.disarm(hook)
    assert faults.met(hook) > before
    assert during["output_ids"] == expected[0]
    assert generate(server, prompts[1], **TOKENS)["output_ids"] == expected[1]


def count_logged(server: Server, hook: str) -> int:
    """Number of errors of the hook, or of `commit`, in the log."""
    if hook == "commit":
        return server.log.count("Speculation failed while committing the tokens of a pass;")
    method = ROWS[hook].target.rpartition(".")[2]
    return server.log.count(f"the hook {hook} on {method}")


def test_the_server_retries_a_sidecar_that_could_not_be_started(
    server: Server, prompts: list[str], expected: list[list[int]]
) -> None:
    until(lambda: state(server)["sidecar"] == "ready")
    assert state(server)["sidecar_restarts"] == 1
    assert "the scheduler's process cannot be forked ([Errno 11]" in server.log
    assert server.log.count("could not be started ([Errno 11]") == 2
    answers = [generate(server, prompt, **TOKENS)["output_ids"] for prompt in prompts]
    assert answers == expected
    assert of_sidecar(state(server)["accepted_tokens"]) > 0


ELSEWHERE = {"start", "fork_scheduler", "repair_detokenizer", "repair_scheduler"}
ELSEWHERE |= {"run_grpc", "engine_generate", "engine_async_generate"}
"""Hooks that no HTTP request reaches: the start, native gRPC and `sgl.Engine`. `test_hooks` tests
their guards, and `test_faulty_start` the start."""
SKIPPED = [
    name for name, row in ROWS.items() if row.on_error is OnError.SKIP and name not in ELSEWHERE
]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("hook", SKIPPED)
def test_an_error_in_a_hook_of_one_answer_costs_only_what_the_hook_adds(
    server: Server,
    faults: Faults,
    prompts: list[str],
    expected: list[list[int]],
    undisturbed: dict[str, object],
    hook: str,
    moment: str,
) -> None:
    with armed(server, faults, hook, moment, prompts, expected):
        assert ask_all(server) == undisturbed
        answer = generate(server, tagged(prompts[0], "a guess"), **TOKENS)
        bare = generate(server, prompts[0], max_new_tokens=1)
        longer = answer["meta_info"]["prompt_tokens"] > bare["meta_info"]["prompt_tokens"]
        # Without the hook that reads tags, they are text, as on a server without QSPEC.
        assert longer == (hook == "serve_generate" and moment == "before")
        assert longer or answer["output_ids"] == expected[0]
        shown = server.get("/server_info")["internal_states"][0]
        completions = {"server_args": {"qspec_completions": 4}}
        updated = server.post("/set_internal_state", completions)
        if moment == "before":
            assert isinstance(answer["meta_info"]["qspec"], LOST.get(hook, dict))
            assert ("qspec" in shown) == (hook != "describe")
            assert updated == [hook != "add_handlers"]
        if (hook, moment) == ("check_update", "before"):
            # The front process did not check the value, so the scheduler refuses it.
            wrong = {"server_args": {"qspec_completions": 400}}
            assert server.post("/set_internal_state", wrong) == [False]
        assert "sglang:qspec_live_requests" in server.get("/metrics")
    assert count_logged(server, hook) == 1
    assert not state(server)["failed"]


LOST: dict[str, type] = {"complete_meta_info": list}
"""Type of `meta_info.qspec` after an error in a hook, where it is not the usual dict."""


def test_a_refused_request_is_still_a_400(server: Server, prompts: list[str]) -> None:
    wrong = {"custom_params": {"qspec_completions": -1}}
    openai = {"model": "m", "max_tokens": 2, **wrong}
    for path, body in (
        ("/generate", {"text": prompts[0], "sampling_params": wrong}),
        ("/v1/completions", {"prompt": QUESTION, **openai}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **openai}),
        ("/set_internal_state", {"server_args": {"qspec_completions": 400}}),
    ):
        with pytest.raises(ServerError, match="HTTP 400.*qspec_completions"):
            server.post(path, body)


@pytest.mark.parametrize("hook", ["commit", "polled", "enqueued", "aborted"])
def test_an_error_where_requests_are_followed_ends_speculation_and_its_sidecar(
    server: Server, faults: Faults, prompts: list[str], expected: list[list[int]], hook: str
) -> None:
    if state(server)["failed"]:
        faults.revive()
        until(lambda: not faults.reviving)
    assert not state(server)["failed"]
    assert generate(server, prompts[0], **TOKENS)["meta_info"]["qspec"]["passes"] > 0
    with armed(server, faults, hook, "before", prompts, expected):
        if hook == "aborted":
            abort_in_queue(server, faults, prompts[0])
        until(lambda: state(server)["failed"])
    assert count_logged(server, hook) == 1
    until(lambda: not sidecar_processes(server))
    assert state(server)["sidecar"] == "lost"
    for prompt, ids in zip(prompts, expected, strict=True):
        after = generate(server, prompt, **TOKENS)
        assert "qspec" not in after["meta_info"]
        assert after["output_ids"] == ids
    chosen = generate(server, prompts[0], temperature=0.8, max_new_tokens=8)
    assert chosen["meta_info"]["completion_tokens"] == 8
    assert server.post("/set_internal_state", {"server_args": {"qspec_enabled": 1}}) == [False]
    assert server.post("/flush_cache", {})
    assert "sidecar_state{" in server.get("/metrics")


def abort_in_queue(server: Server, faults: Faults, prompt: str) -> None:
    """Abort a request that waits in the queue."""
    rids = [f"long-{number}" for number in range(4)]  # at most two of them run
    body = {
        "text": [prompt] * len(rids),
        "rid": rids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.post, "/generate", body)

        def abort(rid: str) -> bool:
            server.post("/abort_request", {"rid": rid})
            return faults.met("aborted") > 0

        until(lambda: abort(rids[-1]))
        until(lambda: [abort(rid) for rid in rids] and answers.done())
        answers.exception()  # the call fails, since one request never ran
