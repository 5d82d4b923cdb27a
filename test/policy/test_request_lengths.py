"""The lengths of prompts and answers follow recent requests."""

import pytest

from sglang_qspec.policy.request_lengths import MOST, RequestLengths


def test_nothing_is_known_before_the_first_request() -> None:
    assert RequestLengths().prompt_tokens_per_output_token == 0.0


def test_limits_count_until_an_answer_has_ended() -> None:
    lengths = RequestLengths()
    lengths.arrive(100, 50)
    assert lengths.prompt_tokens_per_output_token == 2.0
    lengths.end(20)
    assert lengths.prompt_tokens_per_output_token == 5.0


def test_a_high_limit_is_no_long_answer() -> None:
    lengths = RequestLengths()
    lengths.arrive(512, 1 << 20)
    assert lengths.prompt_tokens_per_output_token == 512 / MOST


def test_the_means_follow_recent_requests() -> None:
    lengths = RequestLengths()
    for prompt, answer in ((1000, 10), (60, 30)):
        for _ in range(200):
            lengths.arrive(prompt, answer)
            lengths.end(answer)
    assert lengths.prompt_tokens_per_output_token == pytest.approx(2.0, rel=0.01)


def test_answers_without_tokens_have_a_length() -> None:
    lengths = RequestLengths()
    lengths.arrive(10, 0)
    lengths.end(0)
    assert lengths.prompt_tokens_per_output_token == 10.0
