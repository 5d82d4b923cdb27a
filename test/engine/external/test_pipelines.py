"""Every pipeline gives the target's tokens on a running server: real models, float32, greedy."""

import contextlib
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from benchmark.harness.server import Server, ServerError
from sglang_qspec.config import MODES, PIPELINES
from test.engine.contract import seeded
from test.engine.frequencies import PARAMETERS, check_first_tokens
from test.engine.server.running import GREEDY, ids, state, turn

pytestmark = pytest.mark.server

STEPS = {"custom_params": {"qspec_sources": ["step"]}}


def served(server: Server, mode: str) -> str:
    """The pipeline that serves the mode: a server with SGLang's overlap scheduler has no halves."""
    overlaps = not server.get("/server_info")["disable_overlap_schedule"]
    return "ahead" if overlaps and mode == "halves" else mode


def generate(server: Server, prompts: list[str], **params: Any) -> list[dict[str, Any]]:
    body = {"text": prompts, "sampling_params": {**GREEDY, **params}}
    answers: list[dict[str, Any]] = server.post("/generate", body)
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_every_pipeline_gives_the_targets_tokens(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], mode: str
) -> None:
    turn(server, mode=MODES.index(mode), draft_token_num=6, fixed_width=0)
    before = state(server)
    assert before["settings"]["mode"] == mode
    answers = generate(server, prompts)
    assert ids(answers) == ids(expected)
    after = state(server)
    passes = {
        name: totals["passes"] - before["pipelines"][name]["passes"]
        for name, totals in after["pipelines"].items()
    }
    if mode == "auto":
        assert passes["queue"] == 0 < sum(passes.values())
    else:
        ran = served(server, mode)
        # A last request alone cannot be halved, so it is drafted ahead.
        allowed = {ran, "ahead"} if ran == "halves" else {ran}
        assert passes[ran] > 0
        assert all(name in allowed for name, count in passes.items() if count)
    steps = {
        name: after["accepted_tokens"][name] - before["accepted_tokens"][name]
        for name in ("step", "queue")
    }
    assert steps["step"] == 0 if mode == "queue" else steps["step"] > 0


@pytest.mark.parametrize("mode", PIPELINES)
def test_step_drafts_alone_are_accepted_in_every_pipeline(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], mode: str
) -> None:
    turn(server, mode=MODES.index(mode), draft_token_num=5, fixed_width=1)
    answers = generate(server, prompts, **STEPS)
    assert ids(answers) == ids(expected)
    records = [answer["meta_info"]["qspec"] for answer in answers]
    passes = sum(record["passes"] for record in records)
    accepted = sum(record["accepted_by_source"]["step"] for record in records)
    assert accepted > passes / 4  # nearly three per pass on an idle machine
    if (ran := served(server, mode)) != "ahead":
        assert state(server)["pipelines"][ran]["waited_seconds"] > 0


def test_a_seed_gives_the_same_text_in_every_pipeline_and_width(
    server: Server, prompts: list[str]
) -> None:
    def texts(enabled: bool) -> list[list[int]]:
        custom = {"custom_params": {"qspec_enabled": enabled}}
        sampling = [{**seeded(number), **custom} for number in range(len(prompts))]
        return ids(server.post("/generate", {"text": prompts, "sampling_params": sampling}))

    alone = texts(False)
    for mode, width, step_tokens, fixed in (
        ("sequential", 6, 4, 0),
        ("halves", 4, 3, 1),
        ("ahead", 6, 16, 1),
        ("queue", 2, 16, 0),
    ):
        turn(
            server,
            mode=MODES.index(mode),
            draft_token_num=width,
            step_tokens=step_tokens,
            fixed_width=fixed,
        )
        before = sum(state(server)["accepted_tokens"].values())
        assert texts(True) == alone
        assert sum(state(server)["accepted_tokens"].values()) > before
    turn(server, step_tokens=16)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARAMETERS)
def test_first_tokens_are_as_frequent_whatever_the_parameters(server: Server, name: str) -> None:
    turn(server, mode=MODES.index("sequential"), draft_token_num=6, fixed_width=0)
    check_first_tokens(server, PARAMETERS[name], {}, 1000)


def test_a_custom_logit_processor_disables_drafts_for_its_own_request_only(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    turn(server, mode=MODES.index("ahead"), draft_token_num=6, fixed_width=0)
    forbidden = expected[0]["output_ids"][:2]
    body = {
        "text": prompts[0],
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling_params": {**GREEDY, "custom_params": {"token_ids": forbidden}},
    }
    alone = server.post("/generate", body)["output_ids"]
    assert not set(alone) & set(forbidden)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(generate, server, prompts[1:6])
        assert server.post("/generate", body)["output_ids"] == alone
        answers = others.result()
    assert ids(answers) == ids(expected[1:6])
    assert sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in answers) > 40


def test_log_probabilities_are_the_same_while_others_are_served_in_halves(
    server: Server, prompts: list[str]
) -> None:
    """A batch with log probabilities is not split; batches before and after it are."""

    def logprobs() -> list[list[float]]:
        body = {"text": prompts[:2], "sampling_params": GREEDY, "return_logprob": True}
        answers = server.post("/generate", body)
        return [[p for p, *_ in a["meta_info"]["output_token_logprobs"]] for a in answers]

    turn(server, mode=MODES.index("ahead"), draft_token_num=6, fixed_width=0)
    alone = logprobs()
    turn(server, mode=MODES.index("halves"))
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(generate, server, prompts[2:6])
        beside = pool.submit(logprobs).result()
        others.result()
    for one, other in zip(alone, beside, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_requests_in_halves_continue_when_other_clients_hang_up(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    turn(server, mode=MODES.index("halves"), draft_token_num=6, fixed_width=0)
    rng = random.Random(7)
    with ThreadPoolExecutor(8) as pool:
        staying = [pool.submit(generate, server, [text]) for text in prompts]
        for text in prompts:
            pool.submit(hang_up, server, text, rng.uniform(0.05, 0.6))
        answers = [future.result()[0]["output_ids"] for future in staying]
    assert answers == ids(expected)


def hang_up(server: Server, text: str, seconds: float) -> None:
    """Ask, and close the connection before the answer is complete."""
    body = {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 400}}
    with contextlib.suppress(ServerError, TimeoutError, socket.timeout, OSError):
        server.post("/generate", body, timeout=seconds)
