"""Jacobi iteration: the target's tokens behind guesses are the guesses of the next pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sglang_qspec.engine.requests.jacobi import Jacobi
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import DraftTree, DraftTrees, Source, TrieLimits, TrieStore
from test.engine.speculating import connect, enqueue, finish_pass

VOCAB = 1000
PROMPT = [5, 6, 7]


def new(length: int) -> Jacobi:
    return Jacobi(length, TrieStore(TrieLimits(vocab_size=VOCAB)))


def tree(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    sources = (Source.JACOBI,) * len(tokens)
    return DraftTree(tuple(tokens), tuple(parents), sources, (1.0,) * len(tokens))


def run(
    jacobi: Jacobi, target: Callable[[Sequence[int]], int], text: list[int], passes: int
) -> int:
    """Decode a request greedily over its guesses alone; returns the number of accepted ones."""
    accepted = 0
    for _ in range(passes):
        window = jacobi.window("a", len(text))
        nodes = [text[-1], *window]
        targets = [target(text + window[:count]) for count in range(len(window) + 1)]
        trees = DraftTrees.of([tree(nodes, [0, *range(len(window))])], len(nodes))
        jacobi.improve(["a"], [len(text)], trees, np.array(targets, np.int32))
        right = 0
        while right < len(window) and window[right] == targets[right]:
            right += 1
        text += [*window[:right], targets[right]]
        accepted += right
    return accepted


def test_the_iteration_ends_at_the_targets_own_text() -> None:
    jacobi = new(4)
    jacobi.begin("a", 1, PROMPT)
    text = [8]
    # A token depends on its position alone, so that each guess is right after one pass.
    accepted = run(jacobi, lambda before: 100 + len(before), text, 6)
    assert text == [8, *range(101, 101 + len(text) - 1)]
    assert accepted == 3 * 4  # after a pass with four right guesses none is known


def test_a_text_that_depends_on_the_token_before_is_found_pass_by_pass() -> None:
    jacobi = new(4)
    jacobi.begin("a", 1, PROMPT)
    text = [8]
    run(jacobi, lambda before: (3 * before[-1] + 1) % VOCAB, text, 10)
    assert text == text[:1] + [(3 * token + 1) % VOCAB for token in text[:-1]]


@pytest.mark.parametrize(
    ("nodes", "parents", "targets", "expected"),
    [
        ([8, 6, 7], [0, 0, 1], [90, 91, 92], [90, 91, 92]),
        ([8, 6], [0, 0], [90, 91], [90, 91, None]),  # the pass had no room for the second guess
        ([8, 30, 6, 31], [0, 0, 0, 1], [90, 91, 92, 93], [90, 92, None]),  # other drafts beside it
        ([8, 30, 31], [0, 0, 1], [90, 91, 92], [90, None, None]),  # no guess at all
    ],
)
def test_only_rows_of_guesses_improve_them(
    nodes: list[int], parents: list[int], targets: list[int], expected: list[int | None]
) -> None:
    jacobi = new(3)
    jacobi.begin("a", 1, [6, 7, 6, 7, 6, 7])
    first = jacobi.window("a", 1)
    assert set(first) <= {6, 7}
    nodes = [{6: first[0], 7: first[1]}.get(token, token) for token in nodes]
    trees = DraftTrees.of([tree([1], [0]), tree(nodes, parents)], len(nodes))
    behind = np.array([0] * len(nodes) + targets, np.int32)
    jacobi.improve(["other", "a"], [4, 1], trees, behind)
    wanted = [first[place] if token is None else token for place, token in enumerate(expected)]
    assert jacobi.window("a", 1) == wanted


def test_first_guesses_are_in_the_vocabulary() -> None:
    jacobi = new(8)
    jacobi.begin("a", 1, [-1, VOCAB, 2**31])
    assert jacobi.window("a", 0) == [0] * 8


def test_a_request_without_guesses_has_an_empty_window() -> None:
    jacobi = new(8)
    assert jacobi.window("a", 3) == []
    jacobi.improve(["a"], [3], DraftTrees.roots(1), np.array([5], np.int32))
    assert not jacobi.requests


def test_guesses_end_with_their_request(link: FakeSidecarLink) -> None:
    active = connect(link, jacobi_tokens=3)
    jacobi = active.jacobi
    assert jacobi is not None
    enqueue(active, "a", custom_params={"qspec_sources": ["jacobi"]})
    enqueue(active, "b", custom_params={"qspec_sources": ["output"]})
    assert jacobi.requests == {"a"}
    trees = active.propose(["a", "b"], [[8], [8]], 4)
    assert trees.sizes.tolist() == [4, 1]
    jacobi.improve(["a", "b"], [1, 1], trees, np.array([50, 51, 52, 53, 0, 0, 0, 0], np.int32))
    finish_pass(active, ["a", "b"], trees, [[], []], [50, 50])
    trees = active.propose(["a", "b"], [[8, 50], [8, 50]], 4)
    # The guess behind 50 is the target's token behind the guess of 50's place.
    assert trees.token_ids[0, :3].tolist() == [50, 51, 52]
    active.check_integrity()
    active.end("a")
    assert not jacobi.requests


@pytest.mark.parametrize("improved", [True, False])
def test_wrong_guesses_of_the_target_are_left_out_and_first_ones_are_tried_again(
    link: FakeSidecarLink, improved: bool
) -> None:
    active = connect(link, jacobi_tokens=3)
    jacobi = active.jacobi
    assert jacobi is not None
    enqueue(active, max_new_tokens=1000, custom_params={"qspec_sources": ["jacobi"]})
    outputs = list(range(100, 400))
    for length in range(1, len(outputs)):
        trees = active.propose(["a"], [outputs[:length]], 4)
        if improved:
            targets = np.array([outputs[length], 900, 901, 902], np.int32)
            jacobi.improve(["a"], [length], trees, targets)
    assert bool(trees.sizes[0] > 1) is not improved


def test_without_the_setting_nothing_is_guessed(active: Speculator) -> None:
    assert active.jacobi is None
    enqueue(active, custom_params={"qspec_sources": ["jacobi"]})
    assert active.propose(["a"], [[8]], 4).sizes.tolist() == [1]
