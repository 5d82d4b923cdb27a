"""Invalid arguments of the compiled tries: errors name the argument, and nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.trie import RequestTrie, Source, TrieLimits, Trust
from sglang_qspec.trie._native import Trie, count_by_position, count_by_source, lay_out, propose

LIMITS = TrieLimits(vocab_size=1000)


def test_limits_beyond_the_range_of_node_numbers_are_refused() -> None:
    for name in ("max_request_tokens", "max_lookup_tokens", "max_match", "max_cursors"):
        with pytest.raises(ConfigError, match=f"{name} is {1 << 30}, but must be from"):
            TrieLimits(1000, max_total_tokens=1 << 31, **{name: 1 << 30})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_request_tokens": -1}, "max_request_tokens is -1, but must be from 1"),
        ({"max_cursors": -1}, "max_cursors is -1, but must be from 1"),
        ({"max_match": 33}, "max_match is 33, but trust's is 32"),
        ({"last_prompt_id": 1000}, "last_prompt_id is 1000, but must be from 0 to 999"),
        ({"usable_prompt": [1, -1]}, r"usable_prompt\[1\] is -1, but a token id is from 0 to 999"),
        ({"usable_prompt": [1] * 65}, r"len\(usable_prompt\) is 65, but must be from 0 to 64"),
    ],
)
def test_invalid_arguments_of_a_trie_are_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "usable_prompt": [1],
        "last_prompt_id": 1,
        "vocab_size": 1000,
        "max_request_tokens": 100,
        "max_lookup_tokens": 66 if "max_match" in changed else 64,
        "max_match": 32,
        "max_cursors": 4,
        "max_scan": 4,
        "trust": Trust(32),
        "sources": 31,
        "max_width": 8,
    }
    with pytest.raises(ValueError, match=message):
        Trie(**{**arguments, **changed})
    with pytest.raises(TypeError):
        Trie(**{**arguments, "trust": None})


def test_trust_needs_a_positive_match_length() -> None:
    with pytest.raises(ValueError, match="max_match is -1, but must be from 1"):
        Trust(-1)


@pytest.mark.parametrize("token", [-1, 1000, 1 << 40])
def test_output_outside_the_vocabulary_is_refused_and_changes_nothing(token: int) -> None:
    trie = RequestTrie([1], LIMITS)
    with pytest.raises(ValueError, match=rf"token_ids\[1\] is {token}, but a token id is from 0"):
        trie.commit([5, token])
    assert trie.output_len == 0
    trie.check_integrity()


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source is 77, but a draft's is 0"):
        Trie.insert_chunk(RequestTrie([1], LIMITS), 77, 0, 0, 0, [1], [], False)


def test_token_ids_that_shrink_while_they_are_read_are_safe() -> None:
    token_ids: Any = [1, 2, 3]

    class Shrinking:
        def __index__(self) -> int:
            token_ids.clear()
            return 7

    token_ids[0] = Shrinking()
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, token_ids)
    assert trie.propose(4).token_ids == (1, 7)


@pytest.mark.parametrize(
    ("width", "floor", "message"),
    [
        (0, 0.1, "width is 0, but must be from 1"),
        (1 << 30, 0.1, "width is 1073741824"),
        (2, float("nan"), "floor is nan"),
    ],
)
def test_invalid_arguments_of_a_proposal_are_refused(
    width: int, floor: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        propose([RequestTrie([1], LIMITS)], [1], width, floor)


PARENTS, SIZES = np.array([[0, 0, 1]], np.int32), np.array([3], np.int32)


@pytest.mark.parametrize(
    ("parents", "sizes", "message"),
    [
        (np.array([[0, 0, 2]], np.int32), SIZES, r"parents\[0, 2\] is 2, but must be from 0 to 1"),
        (np.array([[0, -9, 1]], np.int32), SIZES, r"parents\[0, 1\] is -9"),
        (PARENTS, np.array([0], np.int32), r"sizes\[0\] is 0, but must be from 1 to 3"),
        (PARENTS, np.array([4], np.int32), r"sizes\[0\] is 4"),
        (PARENTS, np.array([3, 3], np.int32), r"parents has the shape \[1, 3\], but must have"),
        (PARENTS[0], SIZES, "parents has 1 dimensions"),
        (np.zeros((1, 0), np.int32), SIZES, "parents' width is 0"),
    ],
)
def test_invalid_parents_and_sizes_are_refused(
    parents: np.ndarray, sizes: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(parents, sizes)


@pytest.mark.parametrize(
    ("wrong", "value", "message"),
    [
        ("sources", np.array([[0, 9, 0]], np.uint8), r"sources\[0, 1\] is 9, but must be from 0"),
        ("sources", np.zeros((1, 2), np.uint8), r"sizes\[0\] is 3, but must be from 1 to 2"),
        ("paths", [[-1]], r"paths\[0, 0\] is -1, but must be from 0 to 2"),
        ("paths", [[1], [1]], "there are 2 paths, but 1 trees"),
        ("judged", np.zeros((len(Source), 0), np.int64), "positions of judged is 0"),
        ("judged", np.zeros((4, 2), np.int64), "judged has the shape"),
        ("accepted", np.zeros((len(Source), 1), np.int64), "accepted has the shape"),
    ],
)
def test_invalid_arguments_of_a_count_are_refused(wrong: str, value: object, message: str) -> None:
    arguments: dict[str, Any] = {
        "parents": PARENTS,
        "sources": np.zeros((1, 3), np.uint8),
        "sizes": SIZES,
        "paths": [[1]],
        "judged": np.zeros((len(Source), 2), np.int64),
        "accepted": np.zeros((len(Source), 2), np.int64),
    }
    with pytest.raises(ValueError, match=message):
        count_by_position(**{**arguments, wrong: value})
    assert not arguments["judged"].any()


def test_a_count_by_source_refuses_a_size_beyond_the_width() -> None:
    with pytest.raises(ValueError, match=r"sizes\[0\] is 4, but must be from 1 to 3"):
        count_by_source(np.zeros((1, 3), np.uint8), np.array([4], np.int32))
