from typing import Any

import pytest

from sglang_qspec import controls
from sglang_qspec.config import QSpecConfig
from sglang_qspec.errors import RequestError

SERVER = QSpecConfig(completions=4, temperature=0.8, top_p=0.9, max_completion_tokens=100)


def test_a_request_without_options_gets_the_servers_settings() -> None:
    for custom_params in (None, {}, {"other": 1, "qspec_guess_ids": [1], "qspec_guesses": "a"}):
        assert controls.read(custom_params, SERVER) == controls.of_server(SERVER)
    assert controls.of_server(SERVER).greedy_first
    assert not controls.of_server(QSpecConfig(disable_greedy_first=True)).greedy_first


def test_a_request_may_lower_every_setting() -> None:
    wanted = controls.read(
        {
            "qspec_completions": 1,
            "qspec_draft_token_num": 3,
            "qspec_temperature": 0,
            "qspec_top_p": 0.5,
            "qspec_greedy_first": False,
            "qspec_max_completion_tokens": 100,
            "qspec_sources": ["guess", "queue"],
            "qspec_return_provenance": True,
            "qspec_return_trace": True,
        },
        SERVER,
        8,
    )
    assert wanted == controls.Controls(
        enabled=True,
        sources=frozenset({"guess", "queue"}),
        completions=1,
        draft_token_num=3,
        temperature=0.0,
        top_p=0.5,
        greedy_first=False,
        max_completion_tokens=100,
        return_provenance=True,
        return_trace=True,
    )
    assert not controls.read({"qspec_enabled": False}, SERVER).enabled


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("qspec_completions", 5, "from 1 to 4"),
        ("qspec_completions", 0, "from 1 to 4"),
        ("qspec_completions", True, "from 1 to 4"),
        ("qspec_completions", 2.0, "from 1 to 4"),
        ("qspec_temperature", 0.81, "from 0 to 0.8"),
        ("qspec_temperature", float("nan"), "from 0 to 0.8"),
        ("qspec_temperature", "0.1", "from 0 to 0.8"),
        ("qspec_top_p", -0.1, "from 0 to 0.9"),
        ("qspec_max_completion_tokens", 101, "from 1 to 100"),
        ("qspec_draft_token_num", 9, "from 1 to 8"),
        ("qspec_draft_token_num", 0, "from 1 to 8"),
        ("qspec_return_provenance", "yes", "true or false"),
        ("qspec_return_trace", 1, "true or false"),
        ("qspec_greedy_first", 1, "true or false"),
        ("qspec_enabled", None, "true or false"),
        ("qspec_sources", [], "one or more of queue, guess, prompt, output"),
        ("qspec_sources", ["queue", "trie"], "one or more of"),
        ("qspec_sources", "queue", "one or more of"),
    ],
)
def test_an_error_names_the_bad_value_and_what_is_allowed(
    key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError) as caught:
        controls.read({key: value}, SERVER, 8)
    assert f"{key} in custom_params is {value!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_an_unknown_key_with_the_prefix_is_an_error_that_lists_the_known_keys() -> None:
    with pytest.raises(RequestError, match=r"qspec_tempreature .*qspec_temperature"):
        controls.read({"qspec_tempreature": 0.1}, SERVER)
