"""Random operations on the tries; `scripts/sanitize` runs them on a build with sanitizers."""

import pytest

from test.trie.fuzz import TrieFuzz


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_all_invariants(seed: int) -> None:
    TrieFuzz(seed).run(2000)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_operations_keep_all_invariants(seed: int) -> None:
    TrieFuzz(seed).run(10_000)
