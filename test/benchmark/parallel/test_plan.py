"""Blocks: what they hold, and in which order they are served."""

from __future__ import annotations

from benchmark.parallel.plan import (
    BASELINES,
    NAMES,
    PIPELINES,
    Block,
    blocks_of,
    mixed,
    prompts_of,
    running,
)


def test_every_other_round_is_served_backwards() -> None:
    first, second, third = (
        [(b.in_flight, b.k, b.configs) for b in blocks_of(NAMES, [1, 4], [2, 4], 3, 0)][i : i + 4]
        for i in (0, 4, 8)
    )
    assert first == third
    assert second == [(level, k, configs[::-1]) for level, k, configs in first[::-1]]
    assert [(level, k) for level, k, _ in first] == [(2, 1), (2, 4), (4, 1), (4, 4)]


def test_what_does_not_depend_on_k_is_served_with_the_largest_alone() -> None:
    blocks = blocks_of(NAMES, [1, 8], [4], 1, 0)
    assert [name in block.configs for block in blocks for name in BASELINES] == [
        *(False, False),
        *(True, True),
    ]
    assert all(set(PIPELINES) <= set(block.configs) for block in blocks)


def test_a_single_request_has_no_halves() -> None:
    (block,) = blocks_of(NAMES, [4], [1], 1, 0)
    assert set(NAMES) - set(block.configs) == {"halves", "sequential-half"}
    assert blocks_of(["halves"], [4], [1], 1, 0) == []


def test_half_of_the_requests_run_for_the_papers_comparison() -> None:
    assert [running(name, 8) for name in ("halves", "sequential-half")] == [8, 4]


def test_streaming_has_rounds_of_its_own_at_one_k_without_those_that_starve_the_client() -> None:
    blocks = blocks_of(NAMES, [1, 3, 8], [2, 4], 1, 2)
    streamed = [block for block in blocks if block.streamed]
    assert [(b.round, b.in_flight, b.k) for b in streamed] == [
        *((1, 4, 3), (1, 2, 3)),
        *((2, 2, 3), (2, 4, 3)),
    ]
    served = set(NAMES) - {"none-equal", "sequential-half"}
    assert all(set(block.configs) == served for block in streamed)


def test_prompts_are_of_all_groups_in_turn_the_same_for_all_k_and_others_in_each_round() -> None:
    prompts = mixed({"qa": [f"q{n}" for n in range(30)], "rag": ["r0"]})
    assert prompts[:3] == ["q0", "r0", "q1"]
    one, other, second, streamed, small = (
        prompts_of(block, prompts, 3)
        for block in (
            Block(1, 4, 1, False, ()),
            Block(1, 4, 8, False, ()),
            Block(2, 4, 1, False, ()),
            Block(1, 4, 1, True, ()),
            Block(1, 1, 1, False, ()),
        )
    )
    assert one == other
    assert not set(one) & set(second)
    assert [len(found) for found in (one, second, streamed, small)] == [12, 12, 4, 6]


def test_prompts_that_are_too_few_are_served_once_in_a_cell() -> None:
    assert prompts_of(Block(2, 8, 1, False, ()), ["a", "b", "c"], 3) == ["a", "b", "c"]


def test_pipelines_are_compared_with_the_drafts_and_the_width_that_are_theirs() -> None:
    assert PIPELINES["sequential"].runtime(4) == {
        "qspec_mode": 1,
        "qspec_draft_token_num": 5,
        "qspec_step_tokens": 16,
        "qspec_fixed_width": 1,
    }
    assert PIPELINES["ahead"].runtime(4)["qspec_step_tokens"] == 9
    assert PIPELINES["sequential"].runtime(24)["qspec_step_tokens"] == 24
    fixed = {
        name for name, pipeline in PIPELINES.items() if pipeline.runtime(1)["qspec_fixed_width"]
    }
    assert fixed == {"sequential", "sequential-half", "halves", "ahead"}
    assert {name for name in PIPELINES if PIPELINES[name].sources == ("step",)} == {
        *fixed,
        "auto-step",
    }


def test_modes_are_those_of_the_server() -> None:
    from sglang_qspec.config import MODES

    for name, pipeline in PIPELINES.items():
        assert MODES[pipeline.mode] == name.split("-")[0]
