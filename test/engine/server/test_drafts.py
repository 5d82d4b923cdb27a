"""Drafts on a running server: fewer passes, the same tokens, and consistent counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.server.running import (
    GREEDY,
    MAX_NEW_TOKENS,
    all_at_once,
    generate,
    of_sidecar,
    state,
    tagged,
    turn,
    until,
)

pytestmark = pytest.mark.server

WIDEST = 16
"""Tokens of the widest pass of a request on a CPU."""


def test_an_answer_takes_fewer_passes_if_the_pass_over_its_prompt_verifies_drafts(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """With `fixed_width` a draft need not be worth its row."""
    until(lambda: not state(server)["sources"]["guess"]["paused"])  # by wrong guesses of a test
    passes = {}
    for on in (1, 0):
        turn(server, prefill_drafts=on, fixed_width=1)
        custom = {"qspec_guess_ids": expected[4]["output_ids"], "qspec_sources": ["guess"]}
        answer = generate(server, prompts[4], custom_params=custom)
        assert answer["output_ids"] == expected[4]["output_ids"]
        passes[on] = answer["meta_info"]["qspec"]["passes"]
    turn(server, fixed_width=0)
    assert passes[1] < passes[0]


def test_meta_info_adds_up(server: Server, prompts: list[str]) -> None:
    meta = generate(server, prompts[0])["meta_info"]
    record = meta["qspec"]
    assert record["accepted_tokens"] == sum(record["accepted_by_source"].values())
    assert record["accepted_tokens"] <= record["proposed_tokens"]
    # The first token comes from prefill; the last pass may have accepted tokens past the end.
    decoded = meta["completion_tokens"] - 1
    assert record["accept_length"] == pytest.approx(decoded / record["passes"])
    assert record["passes"] + record["accepted_tokens"] - decoded in (0, 1)
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
    """One of our metrics from /metrics, by the value of a label."""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics/")):
        for sample in family.samples:
            if sample.name == "sglang:qspec_" + name:
                assert sample.labels["engine_type"] == "unified"
                found[sample.labels.get(label, "")] = sample.value
    return found


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


def test_flushing_the_cache_keeps_the_server_exact(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    server.post("/flush_cache?timeout=60", {})
    assert generate(server, prompts[5])["output_ids"] == expected[5]["output_ids"]


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
        # The server then averages over this run alone.
        *("--flush-cache", "--warmup-requests", "0"),
    ]
    client = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert client.returncode == 0, client.stderr[-2000:]
    result = json.loads(results.read_text())
    assert result["completed"] == len(PROMPTS)
    accepted = sum(state(server)["accepted_tokens"].values()) - before
    # The first token of each answer comes from prefill.
    decoded = result["total_output_tokens"] - result["completed"]
    assert accepted > decoded / 4
    passes = decoded - accepted  # of each request
    # The server leaves out the draft tokens that passes over prompts accept, and counts those that
    # the last pass of a request accepts past its end.
    others = len(PROMPTS) * (WIDEST - 1)
    assert decoded - others < result["accept_length"] * passes < decoded + others
