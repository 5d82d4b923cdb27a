"""Guesses fit the limits of a server; prompts and answers give their texts."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_qspec.guess_tags import GuessLimits
from sglang_qspec.tools.guesses.guess import Guess, fitted, guess_of, joined
from sglang_qspec.tools.guesses.texts import answers_in, prompt_in

LIMITS = GuessLimits(2, 10, 4)


@pytest.mark.parametrize(
    ("guesses", "texts"),
    [
        ([], []),
        ([Guess("ab", 10)], ["ab"]),
        ([Guess("abcdefghij", 20)], ["abcde"]),
        ([Guess("abcd", 6), Guess("efghij", 6)], ["abcd", "efgh"]),
        ([Guess("abcd", 10), Guess("efgh", 1)], ["abcd"]),
        ([Guess("a", 1), Guess("b", 1), Guess("c", 1)], ["a", "b"]),
        ([Guess("abc", 1), Guess("ab", 1), Guess(" ", 1), Guess("d", 1)], ["abc", "d"]),
        ([Guess("x" * 100, 2)], ["x" * 40]),
    ],
)
def test_guesses_are_cut_and_left_out_to_fit(guesses: list[Guess], texts: list[str]) -> None:
    found = fitted(guesses, LIMITS)
    assert found == texts
    LIMITS.check_texts(found)


def test_the_length_of_a_guess_without_a_count_is_its_characters() -> None:
    assert guess_of("abc") == Guess("abc", 3)
    assert guess_of("") == Guess("", 1)


def test_nothing_joins_a_value_that_the_server_refuses() -> None:
    for custom in ({"qspec_guesses": 7}, {}):
        assert joined(custom, []) is custom
    assert joined({"qspec_guesses": 7}, ["a"]) == {"qspec_guesses": 7}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a b"}, "a b"),
        ({"prompt": [1, 22]}, "1 22"),
        ({"prompt": ["a", "b"]}, "a b"),
        ({"messages": [{"content": "a"}, {"role": "x"}, {"content": "b"}]}, "a\nb"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}, "a "),
        ({"messages": [7, None]}, ""),
        ({"prompt": None}, ""),
        ([], ""),
    ],
)
def test_the_text_of_a_prompt(body: Any, text: str) -> None:
    assert prompt_in(body) == text


@pytest.mark.parametrize(
    ("body", "guesses"),
    [
        ({"choices": [{"text": "abcd"}], "usage": {"completion_tokens": 2}}, [Guess("abcd", 2)]),
        ({"choices": [{"message": {"content": "abcd"}}]}, [Guess("abcd", 4)]),
        (
            {
                "choices": [{"message": {"reasoning_content": "abc", "content": "d"}}],
                "usage": {"completion_tokens": 4},
            },
            [Guess("abc", 3), Guess("d", 1)],
        ),
        ({"choices": [{"text": " "}, {"text": None}, 7, {"message": 7}]}, []),
        ({"choices": [{"text": "ab"}], "usage": {"completion_tokens": "2"}}, [Guess("ab", 2)]),
        ({"choices": 7}, []),
        (7, []),
    ],
)
def test_the_texts_of_an_answer(body: Any, guesses: list[Guess]) -> None:
    assert answers_in(body) == guesses
