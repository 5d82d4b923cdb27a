"""Guesses move from raw prompts into the sampling parameters."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.frontend import guesses, prompts
from sglang_qspec.errors import RequestError

TAGGED = "a<NGRAMGUESS>x</NGRAMGUESS>b"
QSPEC = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="QSPEC"), tokenizer=None)
STOCK = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=None), tokenizer=None)


@pytest.fixture(autouse=True)
def _settings_of_their_own() -> Iterator[None]:
    guesses.settings.cache_clear()
    yield
    guesses.settings.cache_clear()


def test_each_prompt_of_a_batch_gets_its_own_guesses() -> None:
    given: dict[str, Any] = {"top_k": 3, "custom_params": {"other": 1}}
    texts, params = prompts.strip(QSPEC, [TAGGED, "c"], given)
    assert texts == ["ab", "c"]
    assert params == [{"top_k": 3, "custom_params": {"other": 1, "qspec_guesses": ["x"]}}, given]
    assert given == {"top_k": 3, "custom_params": {"other": 1}}
    assert prompts.strip(QSPEC, ["b", "c"], given) == (["b", "c"], given)


def test_parameters_for_another_number_of_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match="has 1 items, but there are 2 prompts"):
        prompts.strip(QSPEC, [TAGGED, "c"], [{}])


@pytest.mark.parametrize("prompt", [TAGGED, [TAGGED], None, [[1, 2]], [["q", TAGGED]]])
def test_prompts_of_a_server_without_qspec_are_left_alone(prompt: Any) -> None:
    assert prompts.strip(STOCK, prompt, {"top_k": 3}) == (prompt, {"top_k": 3})


def test_with_tags_off_and_with_guesses_out_of_band_a_prompt_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params: dict[str, Any] = {"custom_params": {"qspec_guesses": []}}
    assert prompts.strip(QSPEC, TAGGED, params) == (TAGGED, params)
    guesses.settings.cache_clear()
    monkeypatch.setenv("SGLANG_QSPEC_GUESS_TAGS", "off")
    assert prompts.strip(QSPEC, TAGGED, None) == (TAGGED, None)
