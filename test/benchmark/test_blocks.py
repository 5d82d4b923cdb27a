"""Blocks: how prompts are divided, and when their requests arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmark.queueing.load import Block, Load, arrival_times, blocks_of


def test_groups_are_divided_into_a_few_blocks_of_nearly_equal_size() -> None:
    blocks = blocks_of({"qa": [str(number) for number in range(7)], "rag": ["a"]}, 3)
    assert [(b.group, b.part, len(b.prompts)) for b in blocks] == [
        ("qa", 0, 2),
        ("qa", 1, 2),
        ("qa", 2, 3),
        ("rag", 0, 1),
    ]
    assert [text for b in blocks[:3] for text in b.prompts] == [str(n) for n in range(7)]


def test_different_loads_have_different_digests() -> None:
    load = Load((Block("qa", 0, ("Who?",)),), 8, float("inf"))
    others = [
        replace(load, blocks=(Block("qa", 0, ("Who!",)),)),
        replace(load, max_new_tokens=9),
        replace(load, request_rate=2.0),
    ]
    assert load.digest == replace(load).digest
    assert len({load.digest, *(other.digest for other in others)}) == 4


def test_arrivals_are_immediate_or_at_the_given_rate_and_repeatable() -> None:
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    times = arrival_times(2000, 4.0)
    assert times == sorted(times) == arrival_times(2000, 4.0)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(500.0, rel=0.1)
