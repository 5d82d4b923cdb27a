"""The digest of a tokenizer: equal exactly if token ids mean the same texts."""

from __future__ import annotations

import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link.fingerprint import fingerprint, first_difference

VOCABULARY = {"a": 0, "b": 1, "ab": 2}


def test_the_order_of_the_entries_does_not_matter() -> None:
    assert fingerprint(dict(reversed(VOCABULARY.items()))) == fingerprint(VOCABULARY)


def test_special_tokens_count_the_same_inside_or_beside_the_vocabulary() -> None:
    whole = fingerprint({**VOCABULARY, "<eos>": 3})
    assert fingerprint(VOCABULARY, {"<eos>": 3}) == whole
    assert fingerprint({**VOCABULARY, "<eos>": 3}, {"<eos>": 3}) == whole


@pytest.mark.parametrize(
    "other",
    [
        {"a": 1, "b": 0, "ab": 2},
        {"a": 0, "b": 1},
        {"a": 0, "b": 1, "ab": 2, "<eos>": 3},
        {"a": 0, "b": 1, "Ab": 2},
        {"a": 0, "b": 1, "ab": 3},
        {"a": 0, "b": 1, "a b": 2},
    ],
)
def test_a_different_meaning_of_any_id_changes_the_fingerprint(other: dict[str, int]) -> None:
    assert fingerprint(other) != fingerprint(VOCABULARY)


def test_tokens_that_run_together_do_not_collide() -> None:
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a2b": 1})
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a2:1:b": 1})
    assert fingerprint({"1a": 1}) != fingerprint({"a": 11})


def test_a_lone_surrogate_is_a_token_like_any_other() -> None:
    assert fingerprint({"\ud800": 0}) != fingerprint({"\ud801": 0})


def test_two_names_of_one_id_both_count() -> None:
    assert fingerprint({"a": 0, "b": 0}) == fingerprint({"b": 0, "a": 0})
    assert fingerprint({"a": 0, "b": 0}) != fingerprint({"a": 0})


def test_an_invalid_vocabulary_is_a_clear_error() -> None:
    with pytest.raises(LinkError, match="empty"):
        fingerprint({})
    with pytest.raises(LinkError, match="'a' has the ids 0 and 5"):
        fingerprint(VOCABULARY, {"a": 5})
    with pytest.raises(LinkError, match="'a' has the id -1"):
        fingerprint({"a": -1})


@pytest.mark.parametrize(
    ("other", "token_id"),
    [
        (VOCABULARY, None),
        (dict(reversed(VOCABULARY.items())), None),
        ({"a": 0, "b": 1, "Ab": 2}, 2),
        ({"b": 0, "a": 1, "Ab": 2}, 0),
        ({"a": 0, "b": 1}, 2),
        ({"a": 0, "b": 1, "ab": 2, "<eos>": 7}, 7),
        ({"a": 0, "b": 1, "ab": 2, "A": 0}, 0),
        ({}, 0),
    ],
)
def test_the_first_difference_is_the_lowest_id_with_another_text(
    other: dict[str, int], token_id: int | None
) -> None:
    assert first_difference(VOCABULARY, other) == token_id
    assert first_difference(other, VOCABULARY) == token_id
