"""What one request may ask for less of, on a running server."""

from typing import Any

import pytest

from benchmark.server import Server, ServerError
from test.engine.server.running import GREEDY

pytestmark = pytest.mark.server


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
