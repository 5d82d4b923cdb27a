"""Prompts that share KV meet on one sidecar, unless it gets too many requests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.policy.routing import BEGINNING, FEW, SLACK, Candidate, Route, choose

SYSTEM = list(range(BEGINNING))
candidates = st.dictionaries(
    st.text(min_size=1, max_size=9),
    st.builds(Candidate, weight=st.floats(2.0**-4, 1.0), requests=st.integers(0, 2000)),
    min_size=1,
    max_size=16,
)
prompts = st.lists(st.integers(-(1 << 40), 1 << 40), max_size=2 * BEGINNING)


def spread(routes: list[Route], **weights: float) -> Counter[str]:
    """Route the requests one after the other; all stay live."""
    found: Counter[str] = Counter()
    for route in routes:
        now = {name: Candidate(weight, found[name]) for name, weight in weights.items()}
        found[choose(route, now)] += 1
    return found


def test_prompts_with_one_beginning_meet_while_there_is_room() -> None:
    free = {name: Candidate(1.0, 0) for name in "abcd"}
    chosen = {choose(Route.of([*SYSTEM, number]), free) for number in range(50)}
    assert len(chosen) == 1
    assert len({choose(Route.of([number]), free) for number in range(50)}) == 4


@pytest.mark.parametrize("requests", [40, 400])
def test_a_beginning_of_all_prompts_does_not_leave_a_sidecar_idle(requests: int) -> None:
    routes = [Route.of([*SYSTEM, number]) for number in range(requests)]
    found = spread(routes, a=1.0, b=1.0)
    assert max(found.values()) <= SLACK * requests / 2 + 1


def test_equal_prompts_beyond_the_bound_still_meet() -> None:
    full = {"a": Candidate(1.0, 100), "b": Candidate(1.0, 0), "c": Candidate(1.0, 0)}
    for number in range(50):
        route = Route.of([*SYSTEM, number])
        assert choose(route, full) == choose(route, full) != "a"


def test_requests_follow_the_weights() -> None:
    found = spread([Route.of([number]) for number in range(2000)], a=4.0, b=1.0)
    assert found["a"] / 2000 == pytest.approx(0.8, abs=0.05)


@given(prompts, candidates)
def test_a_sidecar_over_its_bound_gets_no_request(
    prompt: list[int], given: dict[str, Candidate]
) -> None:
    chosen = given[choose(Route.of(prompt), given)]
    requests = 1 + sum(each.requests for each in given.values())
    share = chosen.weight / sum(each.weight for each in given.values())
    assert chosen.requests < max(FEW, SLACK * share * requests + 1)


def test_a_route_depends_on_prompt_and_scope_alone() -> None:
    assert Route.of(SYSTEM) == Route.of(list(SYSTEM))
    assert Route.of([*SYSTEM, 1]) != Route.of([*SYSTEM, 2])
    assert Route.of([*SYSTEM, 1]).beginning == Route.of([*SYSTEM, 2]).beginning
    assert Route.of([1, 2]).beginning != Route.of([12]).beginning
    assert Route.of([]).whole == Route.of([]).whole
    assert Route.of(SYSTEM, ("adapter", None)) == Route.of(SYSTEM, ("adapter", None))
    scopes = (None, ("adapter", None), ("other", None), (None, "adapter"))
    routes = [Route.of(SYSTEM, scope) for scope in scopes]
    assert len({route.beginning for route in routes}) == len({route.whole for route in routes}) == 4
