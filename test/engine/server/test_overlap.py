"""Answers of a server whose scheduler processes each result one pass late, as on a GPU.

The answers equal the answers of a server without speculation. Their counts and labels agree with
their tokens.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.harness.server import Server
from test.engine.contract import Answers, Bodies, seeded
from test.engine.server import test_contract
from test.engine.server.running import (
    GREEDY,
    PENALIZED,
    Plain,
    all_at_once,
    generate,
    ids,
    of_sidecar,
    state,
    turned,
    until,
)
from test.engine.server.test_provenance import ASKED, check
from test.engine.server.traces import BOTH, NARROW, body_of, check_trace

pytestmark = pytest.mark.server


def test_every_answer_is_the_targets_and_every_token_has_its_label_and_pass(
    as_gpu: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    assert not as_gpu.get("/server_info")["disable_overlap_schedule"]
    answers = as_gpu.post("/generate", body_of(prompts))
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    accepted = 0
    for answer in answers:
        check(answer)
        check_trace(answer)
        accepted += of_sidecar(answer["meta_info"]["qspec"]["accepted_by_source"])
    assert accepted > sum(len(e["output_ids"]) for e in expected) / 4


OFF = {"qspec_enabled": False}
UNDRAFTED = {"custom_params": {**OFF, "qspec_return_provenance": True}}


def test_passes_without_drafts_do_not_wait_for_the_last_tokens(
    as_gpu: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    before = state(as_gpu)
    answers = [
        as_gpu.post("/generate", {"text": text, "sampling_params": {**GREEDY, **UNDRAFTED}})
        for text in (prompts, prompts[0])
    ]
    after = state(as_gpu)
    assert ids(answers[0]) == ids(expected)
    assert answers[1]["output_ids"] == expected[0]["output_ids"]
    for answer in (*answers[0], answers[1]):
        labels = answer["meta_info"]["qspec_provenance"]
        assert labels == ["target"] * len(answer["output_ids"])
    passes = sum(
        after["pipelines"][name]["passes"] - counts["passes"]
        for name, counts in before["pipelines"].items()
    )
    assert after["early_passes"] - before["early_passes"] > passes / 2


def test_requests_with_drafts_may_join_and_leave_passes_without(
    as_gpu: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """The batch begins without drafts, gets a short request with drafts, and goes on without."""
    before = state(as_gpu)
    with ThreadPoolExecutor(3) as pool:
        off = [pool.submit(generate, as_gpu, prompts[n], custom_params=OFF) for n in (0, 1)]
        for number in (2, 3, 2):
            answer = generate(as_gpu, prompts[number], max_new_tokens=9, custom_params=BOTH)
            assert answer["output_ids"] == expected[number]["output_ids"][:9]
            check(answer)
        for number, future in enumerate(off):
            assert future.result()["output_ids"] == expected[number]["output_ids"]
    after = state(as_gpu)
    assert after["early_passes"] > before["early_passes"]
    assert of_sidecar(after["accepted_tokens"]) > of_sidecar(before["accepted_tokens"])


def test_requests_end_and_are_retracted_between_passes_without_drafts(
    as_gpu: Server, bodies: Bodies, expected: Answers
) -> None:
    before = state(as_gpu)["early_passes"]
    contract = TestContract()
    with turned(as_gpu, draft_token_num=1):
        contract.test_aborted_requests_leave_nothing_behind_and_change_no_other_answer(
            as_gpu, bodies, expected
        )
        contract.test_retracted_requests_give_the_same_answers(as_gpu, bodies, expected)
    assert state(as_gpu)["early_passes"] > before


def test_a_stream_labels_all_tokens_so_far(as_gpu: Server, prompts: list[str]) -> None:
    asked = body_of(prompts[3], custom_params=NARROW)
    pieces = list(as_gpu.stream("/generate", {**asked, "stream": True}))
    for piece in pieces:
        labels = piece["meta_info"]["qspec_provenance"]
        assert len(labels) == len(piece["output_ids"]) == piece["meta_info"]["completion_tokens"]
        assert "target" in labels
    assert len(pieces) > 2
    check(pieces[-1])
    check_trace(pieces[-1])


def test_the_totals_are_the_sums_of_the_answers(as_gpu: Server, prompts: list[str]) -> None:
    """The pass after an end does not count, although it may accept tokens."""
    before = state(as_gpu)["accepted_tokens"]
    answers = all_at_once(as_gpu, prompts)
    after = state(as_gpu)["accepted_tokens"]
    for source, count in after.items():
        reported = [a["meta_info"]["qspec"]["accepted_by_source"][source] for a in answers]
        assert count - before[source] == sum(reported)
    until(lambda: state(as_gpu)["live_requests"] == state(as_gpu)["trie_tokens"] == 0)


def test_a_pass_takes_the_time_from_one_result_to_the_next(
    as_gpu: Server, prompts: list[str]
) -> None:
    before = state(as_gpu)["pipelines"]
    began = time.monotonic()
    generate(as_gpu, prompts[0])
    after = state(as_gpu)["pipelines"]
    taken = time.monotonic() - began
    passes = sum(after[name]["passes"] - before[name]["passes"] for name in after)
    seconds = sum(after[name]["seconds"] - before[name]["seconds"] for name in after)
    assert passes > 0
    assert 0 < seconds < taken


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": n} for n in (1, 2, 3, 7)] + [{"at": n} for n in (1, 3, 10)]
)
def test_an_answer_ends_in_the_middle_of_an_accepted_run(
    as_gpu: Server, prompts: list[str], expected: list[dict[str, Any]], limit: dict[str, int]
) -> None:
    ids = expected[2]["output_ids"]
    custom = {**BOTH, "qspec_guess_ids": ids, "qspec_sources": ["guess"]}
    given: dict[str, Any] = limit if "at" not in limit else {"stop_token_ids": [ids[limit["at"]]]}
    # The other request goes on, so the ended one is in one pass too many.
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(generate, as_gpu, prompts[1])
        answers = [generate(as_gpu, prompts[2], custom_params=custom, **given) for _ in range(3)]
        assert other.result()["output_ids"] == expected[1]["output_ids"]
    for answer in answers:
        size = answer["meta_info"]["completion_tokens"]
        assert answer["output_ids"] == ids[:size]
        if limit.get("max_new_tokens") == 1:
            assert answer["meta_info"]["qspec_provenance"] == ["target"]
        else:
            check(answer)
        check_trace(answer)


def test_a_rid_may_be_used_again_while_its_last_pass_still_runs(
    as_gpu: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(generate, as_gpu, prompts[1])
        for number in (2, 3, 2, 3):
            sampling: dict[str, Any] = {**GREEDY, **ASKED, "max_new_tokens": 8}
            body = {"text": prompts[number], "rid": "again", "sampling_params": sampling}
            answer = as_gpu.post("/generate", body)
            assert answer["output_ids"] == expected[number]["output_ids"][:8]
            check(answer)
        assert other.result()["output_ids"] == expected[1]["output_ids"]


def test_penalties_count_the_tokens_that_sglang_has_not_added_yet(
    as_gpu: Server, plain: Plain, prompts: list[str]
) -> None:
    body = {"text": prompts[: len(PENALIZED)], "sampling_params": PENALIZED}
    answers = as_gpu.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain.penalized]
    assert sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in answers[:-1]) > 0
    off = [{**sampling, "custom_params": {"qspec_enabled": False}} for sampling in PENALIZED]
    answers = as_gpu.post("/generate", {**body, "sampling_params": off})
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain.penalized]


def test_a_seed_gives_the_same_text_with_overlap_and_without(
    as_gpu: Server, server: Server, prompts: list[str]
) -> None:
    sampling = [seeded(number) for number in range(len(prompts))]
    body = {"text": prompts, "sampling_params": sampling}
    ours, theirs = (ids(each.post("/generate", body)) for each in (as_gpu, server))
    assert ours == theirs


class TestContract(test_contract.TestContract):
    @pytest.fixture
    def server(self, as_gpu: Server) -> Server:
        return as_gpu

    @pytest.fixture
    def bodies(self, bodies: Bodies) -> Bodies:
        return bodies[:6]
