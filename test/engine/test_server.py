"""QSPEC on a running server: real target, real sidecar, real drafts, float32, greedy."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmark.demo import render
from benchmark.prompts import PROMPTS
from benchmark.server import Server, ServerError
from sglang_qspec.models import DemoModels

pytestmark = pytest.mark.server

MAX_NEW_TOKENS = 48
GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PENALIZED = [
    {**GREEDY, "frequency_penalty": 0.6},
    {**GREEDY, "presence_penalty": 0.9, "repetition_penalty": 1.2},
    {**GREEDY, "repetition_penalty": 0.8, "min_new_tokens": MAX_NEW_TOKENS},
    GREEDY,
]
SAMPLED = {"temperature": 1.2, "top_k": 3, "max_new_tokens": 4, "ignore_eos": True}
SAMPLED_TEXTS = ["The old house at the end of the road was"] * 250
COMMON = [
    *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "2"),
    *("--max-total-tokens", "16384", "--context-length", "2048", "--log-level", "warning"),
]


def cores(index: int) -> tuple[int, ...]:
    """One processor for the target, another for the sidecar, where there are two."""
    available = sorted(os.sched_getaffinity(0))
    return (available[index % len(available)],)


@pytest.fixture(scope="module")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS)


@dataclass(frozen=True)
class Plain:
    """What the target alone answers, with no plugin's algorithm in the server."""

    greedy: list[dict[str, Any]]
    penalized: list[dict[str, Any]]
    sampled: list[dict[str, Any]]


@pytest.fixture(scope="module")
def plain(models: DemoModels, prompts: list[str]) -> Plain:
    with Server(models.target, COMMON, cores=cores(0)) as server:
        greedy = server.post("/generate", {"text": prompts, "sampling_params": GREEDY})
        penalized = server.post("/generate", {"text": prompts[:4], "sampling_params": PENALIZED})
        sampled = server.post("/generate", {"text": SAMPLED_TEXTS, "sampling_params": SAMPLED})
    return Plain(greedy, penalized, sampled)


@pytest.fixture(scope="module")
def expected(plain: Plain) -> list[dict[str, Any]]:
    return plain.greedy


@pytest.fixture(scope="module")
def server(models: DemoModels, plain: Plain) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *("--speculative-algorithm", "QSPEC"),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
        "--enable-metrics",
    ]
    with Server(models.target, arguments, cores=cores(0)) as running:
        until(lambda: state(running)["sidecar"] == "ready", 120)
        yield running


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for a condition; the time is only a bound for a broken build."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.05)


def state(server: Server) -> dict[str, Any]:
    internal: dict[str, Any] = server.get("/server_info")["internal_states"][0]["qspec"]
    return internal


def generate(server: Server, text: str, **sampling: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/generate", {"text": text, "sampling_params": {**GREEDY, **sampling}}
    )
    return answer


def all_at_once(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda text: generate(server, text), prompts))


def sidecar_process(server: Server) -> psutil.Process:
    (process,) = (p for p in server.processes if "sglang_qspec.sidecar" in " ".join(p.cmdline()))
    return process


def of_sidecar(by_source: dict[str, int]) -> int:
    """Tokens that the sidecar drafted, before or while a request was served."""
    return by_source["queue"] + by_source["step"]


def test_queued_prompts_give_the_targets_own_tokens_in_fewer_passes(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    answers = all_at_once(server, prompts)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    records = [answer["meta_info"]["qspec"] for answer in answers]
    accepted = sum(of_sidecar(record["accepted_by_source"]) for record in records)
    passes = sum(record["passes"] for record in records)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert accepted > tokens / 4
    assert passes < 0.75 * tokens


def test_meta_info_adds_up(server: Server, prompts: list[str]) -> None:
    meta = generate(server, prompts[0])["meta_info"]
    record = meta["qspec"]
    assert record["accepted_tokens"] == sum(record["accepted_by_source"].values())
    assert record["accepted_tokens"] <= record["proposed_tokens"]
    # The first token comes from the prompt's pass.
    assert record["passes"] + record["accepted_tokens"] + 1 == meta["completion_tokens"]
    assert meta["spec_num_proposed_drafts"] == record["proposed_tokens"]
    assert meta["spec_accept_rate"] == pytest.approx(
        record["accepted_tokens"] / record["proposed_tokens"]
    )


def test_metrics_count_what_the_answers_report(server: Server, prompts: list[str]) -> None:
    before = state(server)["accepted_tokens"]
    answers = all_at_once(server, prompts[:4])
    after = state(server)["accepted_tokens"]
    for source, count in after.items():
        reported = [a["meta_info"]["qspec"]["accepted_by_source"][source] for a in answers]
        assert count - before[source] == sum(reported)
    assert of_sidecar(after) > of_sidecar(before)
    until(lambda: metric(server, "accepted_tokens_total", "source") == after)
    assert metric(server, "sidecar_state", "state")["ready"] == 1
    assert metric(server, "drafted_tokens_total")[""] > 0
    first_drafts = state(server)["queue_to_first_draft_seconds"]["count"]
    until(lambda: metric(server, "queue_to_first_draft_seconds_count") == {"": first_drafts})
    until(lambda: metric(server, "live_requests") == {"": 0})


def metric(server: Server, name: str, label: str = "") -> dict[str, float]:
    """One of our series as /metrics has it, by the value of a label."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics/")):
        for sample in family.samples:
            if sample.name == "sglang:qspec_" + name:
                assert sample.labels["engine_type"] == "unified"
                found[sample.labels.get(label, "")] = sample.value
    return found


def test_requests_that_end_leave_nothing_behind(server: Server, prompts: list[str]) -> None:
    all_at_once(server, prompts[:4])
    until(lambda: state(server)["live_requests"] == state(server)["trie_tokens"] == 0)
    until(lambda: state(server)["drafting_rows"] == 0)


def tagged(text: str, guess: str) -> str:
    """A guess in the middle of a prompt, where it must leave no trace."""
    return text[:30] + f"<NGRAMGUESS>{guess}</NGRAMGUESS>" + text[30:]


def test_a_guess_is_used_and_leaves_no_trace_in_the_prompt(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    answer = generate(server, tagged(prompts[1], expected[1]["text"]))
    assert answer["output_ids"] == expected[1]["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == expected[1]["meta_info"]["prompt_tokens"]
    record = answer["meta_info"]["qspec"]
    by_source = record["accepted_by_source"]
    assert by_source["guess"] + of_sidecar(by_source) > MAX_NEW_TOKENS / 2
    assert by_source["guess"] > 0


def test_a_batch_has_guesses_of_its_own(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    texts = [tagged(prompts[0], expected[0]["text"]), prompts[1]]
    answers = server.post("/generate", {"text": texts, "sampling_params": GREEDY})
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected[:2]]
    assert answers[0]["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0
    assert answers[1]["meta_info"]["qspec"]["accepted_by_source"]["guess"] == 0


def test_guesses_may_be_token_ids(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    guess = expected[2]["output_ids"]
    custom = {"qspec_guess_ids": [guess[:8], guess]}
    answer = generate(server, prompts[2], custom_params=custom)
    assert answer["output_ids"] == expected[2]["output_ids"]
    assert answer["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0


def test_chat_and_completions_take_guesses_too(
    server: Server, expected: list[dict[str, Any]], prompts: list[str]
) -> None:
    guess = expected[3]["text"]
    for content in (
        tagged(PROMPTS[3], guess),
        [{"type": "text", "text": tagged(PROMPTS[3], guess)}],
    ):
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
        }
        answer = server.post("/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == guess
        assert answer["usage"]["prompt_tokens"] == expected[3]["meta_info"]["prompt_tokens"]
    completion = {
        "model": "m",
        "prompt": tagged(prompts[3], guess),
        "echo": True,
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
    }
    assert server.post("/v1/completions", completion)["choices"][0]["text"] == prompts[3] + guess
    both = server.post(
        "/v1/completions", {**completion, "prompt": [completion["prompt"], prompts[0]]}
    )
    assert [choice["text"] for choice in both["choices"]] == [
        prompts[3] + guess,
        prompts[0] + expected[0]["text"],
    ]
    assert both["usage"]["prompt_tokens"] == sum(
        expected[index]["meta_info"]["prompt_tokens"] for index in (3, 0)
    )


def test_streaming_gives_the_same_tokens(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    import urllib.request

    body = {"text": tagged(prompts[4], "Each loaf"), "sampling_params": GREEDY, "stream": True}
    request = urllib.request.Request(
        server.url + "/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [line.decode()[6:] for line in response if line.startswith(b"data: {")]
    last = json.loads(lines[-1])
    assert last["text"] == expected[4]["text"]
    assert last["meta_info"]["qspec"]["passes"] > 0
    assert len(lines) > 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a <NGRAMGUESS>b", "never closed"),
        ("a </NGRAMGUESS>b", "closes nothing"),
        ("a <NGRAMGUESS> </NGRAMGUESS>b", "empty"),
        ("a <NGRAMGUESS>" + "x " * 200_000 + "</NGRAMGUESS>b", "at most"),
    ],
)
def test_a_malformed_guess_is_a_400_and_harms_nothing_else(
    server: Server, text: str, words: str
) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": text, "sampling_params": GREEDY}),
        ("/generate", {"text": text, "sampling_params": GREEDY, "stream": True}),
        ("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 4}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
        ),
    ]
    for path, body in bodies:
        with pytest.raises(ServerError, match=f"HTTP 400.*{words}"):
            server.post(path, body)
    assert generate(server, "Hello", max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("value", [[], [1.5], ["a"], [99999999], [[1], []]])
def test_malformed_guess_ids_are_a_400(server: Server, value: Any) -> None:
    with pytest.raises(ServerError, match="HTTP 400.*qspec_guess_ids"):
        generate(server, "Hello", custom_params={"qspec_guess_ids": value})


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ({"qspec_completions": 9}, "qspec_completions.* is 9, but must be .* from 1 to 8"),
        ({"qspec_sources": ["queue", "luck"]}, "qspec_sources.*luck.*queue, guess, prompt, output"),
        ({"qspec_tempreature": 0.1}, "qspec_tempreature.* is not known.*qspec_temperature"),
    ],
)
def test_controls_that_are_not_allowed_are_a_400_that_names_them(
    server: Server, controls: dict[str, Any], words: str
) -> None:
    sampling = {**GREEDY, "custom_params": controls}
    openai = {"model": "m", "max_tokens": 4, "custom_params": controls}
    chat = {**openai, "messages": [{"role": "user", "content": "Hello"}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "Hello", "sampling_params": sampling}),
        ("/generate", {"text": ["Hello", "a"], "sampling_params": [GREEDY, sampling]}),
        ("/v1/completions", {**openai, "prompt": "Hello"}),
        ("/v1/chat/completions", chat),
    ]
    for path, body in bodies:
        for stream in (False, True):
            with pytest.raises(ServerError, match=f"HTTP 400.*{words}"):
                server.post(path, {**body, "stream": stream})


def test_a_request_may_switch_speculation_off_or_choose_its_sources(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    params = [
        {**GREEDY, "custom_params": {"qspec_enabled": False}},
        {**GREEDY, "custom_params": {"qspec_sources": ["prompt", "output"]}},
        {**GREEDY, "custom_params": {"qspec_sources": ["queue"], "qspec_completions": 1}},
    ]
    body = {"text": prompts[:3], "sampling_params": params}
    answers = server.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected[:3]]
    assert "qspec" not in answers[0]["meta_info"]
    for answer, unused in zip(
        answers[1:], (("queue", "guess"), ("guess", "prompt", "output")), strict=True
    ):
        by_source = answer["meta_info"]["qspec"]["accepted_by_source"]
        assert not any(by_source[source] for source in unused)


def test_penalized_answers_are_the_targets_own_in_fewer_passes(
    server: Server, plain: Plain, prompts: list[str]
) -> None:
    """By SGLang's penalizers on a server without speculation, which add up a token a pass."""
    body = {"text": prompts[:4], "sampling_params": PENALIZED}
    answers = server.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain.penalized]
    assert plain.penalized[0]["output_ids"] != plain.greedy[0]["output_ids"]
    for answer in answers:
        assert answer["meta_info"]["qspec"]["accepted_tokens"] > 0


def test_temperature_is_honoured_while_speculating(server: Server, prompts: list[str]) -> None:
    answers = [generate(server, prompts[0], temperature=1.5) for _ in range(3)]
    assert len({answer["text"] for answer in answers}) == 3


def test_sampled_texts_are_as_frequent_as_without_speculation(server: Server, plain: Plain) -> None:
    """Two samples, one distribution? Chi-square over whole texts, rare ones taken together."""
    answers = server.post("/generate", {"text": SAMPLED_TEXTS, "sampling_params": SAMPLED})
    accepted = sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in answers)
    assert accepted > len(answers) / 4  # otherwise this would test plain decoding
    check_equally_frequent(answers, plain.sampled)


def check_equally_frequent(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Fail unless these answers and as many others may be of one distribution."""
    ours = Counter(tuple(answer["output_ids"]) for answer in answers)
    theirs = Counter(tuple(answer["output_ids"]) for answer in others)
    common = [text for text, count in (ours + theirs).items() if count >= 10]
    pairs = [(ours[text], theirs[text]) for text in common]
    pairs.append(tuple(len(answers) - sum(column) for column in zip(*pairs, strict=True)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = len(pairs) - 1
    assert freedom > 5
    # Five standard deviations above its mean: less than one run in ten thousand.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_a_seed_gives_the_same_text_with_drafts_and_without(
    server: Server, prompts: list[str]
) -> None:
    """Of requests beside others, with filters and without, each with a seed of its own."""
    before = of_sidecar(state(server)["accepted_tokens"])
    texts = {}
    for enabled in (True, False):
        sampling = [
            {
                "temperature": 1.0,
                "top_p": 0.9 if number % 2 else 1.0,
                "sampling_seed": number,
                "max_new_tokens": MAX_NEW_TOKENS,
                "custom_params": {"qspec_enabled": enabled},
            }
            for number in range(len(prompts))
        ]
        answers = server.post("/generate", {"text": prompts, "sampling_params": sampling})
        texts[enabled] = [answer["output_ids"] for answer in answers]
    assert texts[True] == texts[False]
    assert of_sidecar(state(server)["accepted_tokens"]) > before
    other = generate(server, prompts[0], temperature=1.0, sampling_seed=99)
    assert other["output_ids"] != texts[True][0]


def test_flushing_the_cache_keeps_the_server_exact(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    server.post("/flush_cache?timeout=10", {})
    assert generate(server, prompts[5])["output_ids"] == expected[5]["output_ids"]


def test_an_aborted_request_leaves_nothing_behind(server: Server, prompts: list[str]) -> None:
    body = {
        "text": prompts[:6],
        "rid": [f"victim-{i}" for i in range(6)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
    }

    def ask() -> None:
        with contextlib.suppress(ServerError):
            server.post("/generate", body)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: state(server)["live_requests"] == 6)
    for rid in body["rid"]:
        server.post("/abort_request", {"rid": rid})
    asking.join(60)
    until(lambda: state(server)["live_requests"] == state(server)["trie_tokens"] == 0)
    until(lambda: state(server)["drafting_rows"] == 0)


def test_200_requests_with_random_aborts_leave_no_trie_no_draft_and_no_kv(
    server: Server, prompts: list[str]
) -> None:
    server.post("/flush_cache?timeout=10", {})
    assert used_tokens(server) == 0
    rng = random.Random(7)
    fates = [rng.choice(["finish", "abort", "hang up"]) for _ in range(200)]
    moments = [rng.uniform(0.05, 4.0) for _ in fates]

    def ask(number: int) -> None:
        """A request that is left alone, aborted by name, or whose client goes away."""
        patience = moments[number] if fates[number] == "hang up" else 120.0
        rid = f"fate-{number}"
        sampling = {**GREEDY, "max_new_tokens": 4 + number % 16, "ignore_eos": True}
        body = {"text": f"{number} is the number of", "rid": rid, "sampling_params": sampling}
        if fates[number] == "abort":
            threading.Timer(moments[number], server.post, ["/abort_request", {"rid": rid}]).start()
        with contextlib.suppress(ServerError, OSError):
            server.post("/generate", body, timeout=patience)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, range(200)))
    work = ("live_requests", "trie_tokens", "requests_in_flight")
    sidecars = ("drafting_requests", "drafting_rows")
    until(lambda: not any(state(server)[name] for name in (*work, *sidecars)))
    # What the radix cache keeps is not in use; a leak would be, also after a flush.
    until(lambda: used_tokens(server) == 0)
    server.post("/flush_cache?timeout=10", {})
    assert used_tokens(server) == 0
    assert generate(server, prompts[0], max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


def used_tokens(server: Server) -> int:
    """KV slots that are neither free nor the radix cache's to give."""
    (load,) = server.get("/v1/loads")["loads"]
    used: int = load["num_used_tokens"]
    return used


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_sglangs_own_client_sees_the_accept_length_that_we_count(
    server: Server, models: DemoModels, tmp_path: Path, backend: str
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    turns = [[{"content": text}, {"content": ""}] for text in PROMPTS]
    dataset.write_text("\n".join(json.dumps({"conversations": pair}) for pair in turns))
    results = tmp_path / "results.jsonl"
    before = sum(state(server)["accepted_tokens"].values())
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", backend),
        *("--base-url", server.url, "--model", str(models.target), "--dataset-name", "custom"),
        *("--dataset-path", str(dataset), "--num-prompts", str(len(PROMPTS))),
        *("--sharegpt-output-len", str(MAX_NEW_TOKENS), "--output-file", str(results)),
        # So that what the server averages is this run.
        *("--flush-cache", "--warmup-requests", "0"),
    ]
    client = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert client.returncode == 0, client.stderr[-2000:]
    result = json.loads(results.read_text())
    assert result["completed"] == len(PROMPTS)
    accepted = sum(state(server)["accepted_tokens"].values()) - before
    # The first token of each comes from the prompt's pass.
    decoded = result["total_output_tokens"] - result["completed"]
    assert accepted > decoded / 4
    # The server's average leaves out the passes since it last logged.
    assert result["accept_length"] == pytest.approx(decoded / (decoded - accepted), rel=0.1)


def test_a_stopped_sidecar_delays_nothing_and_changes_nothing(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    process = sidecar_process(server)
    process.send_signal(signal.SIGSTOP)
    try:
        answers = all_at_once(server, prompts)
    finally:
        process.send_signal(signal.SIGCONT)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    until(lambda: state(server)["sidecar"] == "ready")


def test_a_sidecar_killed_in_the_middle_changes_nothing(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """And the server starts another, which drafts for what comes then."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(all_at_once, server, prompts)
        until(lambda: state(server)["drafting_rows"] > 0)
        sidecar_process(server).kill()
        assert [a["output_ids"] for a in answers.result()] == [e["output_ids"] for e in expected]
    until(lambda: state(server)["sidecar_restarts"] == 1)
    until(lambda: state(server)["sidecar"] == "ready", 240)
    before = state(server)["accepted_tokens"]
    answers = all_at_once(server, prompts)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    assert of_sidecar(state(server)["accepted_tokens"]) > of_sidecar(before)


def test_sglang_serve_starts_the_same_and_leaves_no_process_and_no_socket(
    models: DemoModels,
) -> None:
    arguments = [
        *COMMON,
        *("--speculative-algorithm", "QSPEC", "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0]), "--speculative-qspec-disable-guess-tags"),
    ]
    program = Path(sys.executable).with_name("sglang")
    server = Server(models.target, arguments, cores=cores(0), launcher=[str(program), "serve"])
    try:
        server.start()
        until(lambda: state(server)["sidecar"] == "ready", 120)
        process = sidecar_process(server)
        command = process.cmdline()
        (endpoint,) = (part for part in command if part.startswith("--endpoint="))
        socket = Path(endpoint.removeprefix("--endpoint=ipc://"))
        assert socket.exists()
        # With the parsing turned off a tag is text like any other.
        lengths = [
            generate(server, text, max_new_tokens=1)["meta_info"]["prompt_tokens"]
            for text in ("a b", "a <NGRAMGUESS>b</NGRAMGUESS>", "a <NGRAMGUESS> b")
        ]
        assert lengths[0] < lengths[2] < lengths[1]
    finally:
        server.stop()
    assert not process.is_running()
    assert not socket.parent.exists()
