"""Keys spread over the names by weight, and move only where they must."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.policy.rendezvous import choose

KEYS = [number.to_bytes(4, "big") for number in range(4000)]
names = st.text(min_size=1, max_size=30)
weights = st.floats(2.0**-4, 16.0)
weighted = st.dictionaries(names, weights, min_size=1, max_size=16)
keys = st.lists(st.binary(min_size=0, max_size=64), min_size=1, max_size=50)


@given(keys, weighted, names, weights)
def test_if_a_name_joins_keys_move_only_to_it(
    some: list[bytes], before: dict[str, float], name: str, weight: float
) -> None:
    before.pop(name, None)
    if not before:
        return
    after = {**before, name: weight}
    for key in some:
        assert choose(key, after) in (choose(key, before), name)


@given(keys, weighted)
def test_if_a_name_leaves_only_its_keys_move(some: list[bytes], before: dict[str, float]) -> None:
    gone = min(before)
    after = {name: weight for name, weight in before.items() if name != gone}
    if not after:
        return
    for key in some:
        chosen = choose(key, before)
        assert choose(key, after) == chosen or chosen == gone


@given(keys, weighted)
def test_a_higher_weight_moves_keys_only_to_its_name(
    some: list[bytes], before: dict[str, float]
) -> None:
    raised = max(before)
    after = {**before, raised: 2 * before[raised]}
    for key in some:
        assert choose(key, after) in (choose(key, before), raised)


@given(keys, weighted, st.floats(0.01, 100.0))
def test_only_the_ratio_of_the_weights_counts(
    some: list[bytes], before: dict[str, float], factor: float
) -> None:
    after = {name: factor * weight for name, weight in before.items()}
    changed = sum(choose(key, before) != choose(key, after) for key in some)
    assert changed == 0


@given(keys, weighted)
def test_the_order_of_the_names_does_not_matter(some: list[bytes], given: dict[str, float]) -> None:
    turned = dict(reversed(given.items()))
    assert all(choose(key, given) == choose(key, turned) for key in some)


@pytest.mark.parametrize("given", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 8.0, "b": 1.0, "c": 3.0}])
def test_a_name_gets_the_share_of_its_weight(given: dict[str, float]) -> None:
    found = Counter(choose(key, given) for key in KEYS)
    for name, weight in given.items():
        share = weight / sum(given.values())
        assert found[name] / len(KEYS) == pytest.approx(share, abs=0.03)


def test_the_choice_is_the_same_in_all_processes() -> None:
    """A change of the hash would part the servers of a rolling upgrade."""
    given = {"ipc:///a": 1.0, "ipc:///b": 1.0}
    assert "".join(choose(key, given)[-1] for key in KEYS[:16]) == "bbbbbbbababaaaab"
