"""Fewer drafts, or none, for one request or for all requests of a running server."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.awaiting import held
from test.engine.server.running import GREEDY, generate, state, turn, turned

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    ("controls", "words"),
    [
        ({"qspec_completions": 9}, "qspec_completions.* is 9, but must be .* from 1 to 8"),
        ({"qspec_sources": ["queue", "luck"]}, "qspec_sources.*luck.*queue, guess, prompt, output"),
        (
            {"qspec_draft_token_num": 17},
            "qspec_draft_token_num.* is 17, but must be .* from 1 to 16",
        ),
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


def test_a_request_may_disable_speculation_or_choose_its_sources(
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


def test_a_request_may_have_narrower_passes_or_no_drafts(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    ids = expected[0]["output_ids"]

    def accepted(most: int) -> int:
        custom = {"qspec_guess_ids": ids, "qspec_draft_token_num": most}
        answer = generate(server, prompts[0], custom_params=custom)
        assert answer["output_ids"] == ids
        record = answer["meta_info"]["qspec"]
        assert record["proposed_tokens"] <= (most - 1) * record["passes"]
        assert record["accepted_tokens"] <= record["proposed_tokens"]
        return int(record["accepted_tokens"])

    assert accepted(1) == 0
    assert accepted(3) > 0


def test_drafting_is_switched_off_and_on_for_running_requests(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """One answer gets drafts at first, then none, and then drafts again."""
    custom = {"qspec_return_provenance": True, "qspec_guess_ids": expected[5]["output_ids"]}
    long = {"max_new_tokens": 300, "ignore_eos": True, "custom_params": custom}
    with ThreadPoolExecutor(1) as pool, held(server) as target:
        asked = pool.submit(generate, server, prompts[5], **long)
        target.run(5)
        turn(server, enabled=0)
        target.run(50)
        turn(server, enabled=1)
        target.release()
        labels = asked.result()["meta_info"]["qspec_provenance"]
    # Passes with drafts also give tokens of the target, but seldom many in a row.
    off = next(at for at in range(len(labels)) if set(labels[at : at + 50]) == {"target"})
    assert set(labels[:off]) != {"target"}
    assert set(labels[off + 50 :]) != {"target"}
    assert state(server)["settings"]["enabled"]


def test_a_server_with_speculation_off_drafts_for_no_new_request(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    with turned(server, enabled=0), ThreadPoolExecutor(1) as pool:
        with held(server) as target:
            asked = pool.submit(generate, server, prompts[1])
            target.run(3)
            assert state(server)["live_requests"] == state(server)["trie_tokens"] == 0
            assert state(server)["requests_in_flight"] == 0
        answer = asked.result()
        assert answer["output_ids"] == expected[1]["output_ids"]
        assert "qspec" not in answer["meta_info"]


def test_sources_are_switched_off_for_all_new_requests(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    guess = {"qspec_guess_ids": expected[2]["output_ids"]}
    sources = ("queue", "step", "prompt", "output")
    with turned(server, **{f"source_{source}": 0 for source in sources}):
        answer = generate(server, prompts[2], custom_params=guess)
    assert answer["output_ids"] == expected[2]["output_ids"]
    by_source = answer["meta_info"]["qspec"]["accepted_by_source"]
    assert by_source["guess"] > 0
    assert not any(by_source[source] for source in sources)


def test_right_positions_add_up_to_the_accepted_tokens_of_an_answer(
    server: Server, prompts: list[str]
) -> None:
    before = state(server)["positions"]
    answer = generate(server, prompts[3], max_new_tokens=33, ignore_eos=True)
    after = state(server)["positions"]
    grown = {
        source: [new - old for new, old in zip(row["right"], before[source]["right"], strict=True)]
        for source, row in after.items()
    }
    accepted = answer["meta_info"]["qspec"]["accepted_tokens"]
    # Only the last pass may have accepted tokens past the end.
    assert accepted <= sum(map(sum, grown.values())) <= accepted + 15
    for source, row in after.items():
        assert all(r <= j for r, j in zip(row["right"], row["judged"], strict=True)), source
