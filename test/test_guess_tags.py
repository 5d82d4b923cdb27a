"""Guess tags in text, and guesses as token ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.errors import ConfigError, GuessError
from sglang_qspec.guess_tags import (
    CLOSE_TAG,
    OPEN_TAG,
    GuessLimits,
    flatten,
    read_guess_ids,
    read_guess_texts,
    split,
)

LIMITS = GuessLimits(max_guesses=3, max_tokens=10, max_chars_per_token=2)

plain = st.text(alphabet="ab <>/\n", max_size=8)
pieces = st.sampled_from([OPEN_TAG, CLOSE_TAG, "<NGRAM", "GUESS>", "</", "<", "a", " ", "\n"])
places = st.lists(st.integers(0, 100), max_size=3)
guesses = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=3)


def tagged(guess: str) -> str:
    return f"<NGRAMGUESS>{guess}</NGRAMGUESS>"


@given(st.lists(st.tuples(plain, plain.filter(str.strip)), max_size=4), plain)
def test_tags_and_guesses_are_extracted_and_the_rest_stays(
    parts: list[tuple[str, str]], end: str
) -> None:
    limits = GuessLimits()
    text = "".join(before + tagged(guess) for before, guess in parts) + end
    clean, found = split(text, limits)
    assert clean == "".join(before for before, _ in parts) + end
    assert found == [guess for _, guess in parts]
    assert split(clean, limits)[1] == []


@given(st.lists(pieces, max_size=8).map("".join), places)
def test_only_whole_pairs_are_extracted_from_any_text_and_no_tag_is_left(
    text: str, inserted: list[int]
) -> None:
    """The test inserts guesses anywhere, also inside other tags."""
    for place in inserted:
        text = text[:place] + tagged("x") + text[place:]
    try:
        clean, found = split(text, GuessLimits())
    except GuessError:
        return
    assert OPEN_TAG not in clean
    assert CLOSE_TAG not in clean
    assert split(clean, GuessLimits()) == (clean, [])
    kept, rest = "", text
    for guess in found:
        before, whole, rest = rest.partition(tagged(guess))
        assert whole
        kept += before
    assert kept + rest == clean


def test_text_without_tags_is_returned_as_it_is() -> None:
    text = "a < b, NGRAMGUESS, <ngramguess>x</ngramguess>"
    assert split(text, LIMITS) == (text, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab<NGRAMGUESS>x", "at character 2 is never closed"),
        ("ab</NGRAMGUESS>x", "at character 2 closes nothing"),
        (tagged("x") + "</NGRAMGUESS>", "at character 26 closes nothing"),
        ("<NGRAMGUESS>x" + tagged("y"), "at character 13 is inside the one at character 0"),
        ("a" + tagged(""), "guess at character 1 is empty"),
        (tagged(" \n\t"), "guess at character 0 is empty"),
        (
            f"<NGRAM{tagged('x')}GUESS>",
            "without its guesses the text has <NGRAMGUESS> at character 0",
        ),
        (
            f"ab<{tagged('x')}/NGRAMGUESS>c",
            "text has </NGRAMGUESS> at character 2; no tag may remain",
        ),
        (tagged("x") * 4, "4 guesses; at most 3"),
        (tagged("x" * 21), "21 characters together; at most 20"),
        (tagged("x" * 11) * 2, "22 characters together; at most 20"),
    ],
)
def test_malformed_or_oversized_tags_are_refused(text: str, message: str) -> None:
    with pytest.raises(GuessError, match=message):
        split(text, LIMITS)


def test_caps_hold_over_several_texts_together() -> None:
    LIMITS.check_texts(["x"] * 3)
    with pytest.raises(GuessError, match="4 guesses; at most 3"):
        LIMITS.check_texts(["x"] * 4)
    LIMITS.check_tokens(10)
    with pytest.raises(GuessError, match="11 tokens together; at most 10"):
        LIMITS.check_tokens(11)


@given(guesses)
def test_flat_and_nested_ids_mean_the_same(value: list[list[int]]) -> None:
    flat = flatten(value)
    assert all(item is None or isinstance(item, int) for item in flat)
    assert read_guess_ids(flat, 100) == read_guess_ids(value, 100) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is None, but must be a list"),
        ([], "must be a list"),
        ("12", "must be a list"),
        ({"a": 1}, "must be a list"),
        ([1, None], "guess 1 in qspec_guess_ids is empty"),
        ([None, 1], "guess 0 in qspec_guess_ids is empty"),
        ([[1], []], "guess 1 in qspec_guess_ids is empty"),
        ([1, 100], "holds 100, but a token id must be a whole number from 0 to 99"),
        ([-1], "holds -1"),
        ([1.0], r"holds 1\.0"),
        ([True], "holds True"),
        (["1"], "holds '1'"),
        ([[1], 2], r"holds \[1\]"),
        ([[[1]]], r"holds \[1\]"),
        (["x" * 500], r"x\.\.\."),
    ],
)
def test_invalid_guess_ids_are_refused(value: object, message: str) -> None:
    with pytest.raises(GuessError, match=message):
        read_guess_ids(value, 100)


def test_guesses_as_text_are_a_string_or_a_list() -> None:
    assert read_guess_texts(" one ") == [" one "]
    assert read_guess_texts(["one", tagged("two")]) == ["one", tagged("two")]
    assert read_guess_texts([]) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "qspec_guesses is 7, but must be a string or a list of strings"),
        ({"a": "b"}, "must be a string or a list"),
        (["a", 7], "guess 1 in qspec_guesses is 7, but must be a string"),
        ([["a"]], r"guess 0 in qspec_guesses is \['a'\], but must be a string"),
        ("", "guess 0 in qspec_guesses is empty"),
        (["a", " \n"], "guess 1 in qspec_guesses is empty"),
    ],
)
def test_invalid_guesses_are_refused(value: object, message: str) -> None:
    with pytest.raises(GuessError, match=message):
        read_guess_texts(value)


def test_caps_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        GuessLimits(max_tokens=0)
