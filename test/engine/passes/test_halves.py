"""Membership of the halves."""

import random

from sglang_qspec.engine.passes.decide.halves import Halves


def members(halves: Halves, rids: list[str]) -> tuple[set[str], set[str]]:
    first, second = halves.split(rids)
    return {rids[row] for row in first}, {rids[row] for row in second}


def test_halves_stay_balanced_through_arrivals_aborts_and_retractions() -> None:
    """In each round some requests arrive, end, are retracted or return."""
    for seed in range(50):
        generator = random.Random(seed)
        halves, running, retracted, born = Halves(), [], [], 0
        for _ in range(300):
            for _ in range(generator.choice((0, 0, 1, 1, 2, 9))):
                running.append(f"r{born}")
                born += 1
            leaving = [
                rid for rid in running if generator.random() < generator.choice((0.0, 0.1, 0.7))
            ]
            retracted += [rid for rid in leaving if generator.random() < 0.5]
            running = [rid for rid in running if rid not in leaving]
            while retracted and generator.random() < 0.5:
                running.insert(generator.randrange(len(running) + 1), retracted.pop())
            first, second = members(halves, running)
            assert abs(len(first) - len(second)) <= 1
            assert first | second == set(running)
            assert not first & second


def test_a_request_stays_in_its_half_whatever_its_row() -> None:
    halves = Halves()
    first, second = members(halves, ["a", "b", "c", "d"])
    assert members(halves, ["d", "b", "a", "c"]) == (first, second)


def test_no_more_requests_change_halves_than_balance_needs() -> None:
    halves = Halves()
    first, second = members(halves, [f"r{i}" for i in range(12)])
    staying = sorted(first) + sorted(second)[:1]  # six in one half, one in the other
    now_first, now_second = members(halves, staying)
    assert len(now_first) + len(now_second) == 7
    assert len(first - now_first) == 2
    assert second & set(staying) <= now_second


def test_newcomers_join_the_smaller_half() -> None:
    halves = Halves()
    first, second = members(halves, ["a", "b", "c"])
    assert (len(first), len(second)) == (2, 1)
    assert members(halves, ["a", "b", "c", "d"]) == (first, second | {"d"})


def test_one_request_has_a_half_of_its_own() -> None:
    assert Halves().split(["a"]) == ([0], [])
