"""The order of the cells, and the prompts and settings of each."""

from __future__ import annotations

from pathlib import Path

from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import mixed
from benchmark.parallel.plan import (
    BASELINES,
    NAMES,
    PIPELINES,
    cells_of,
    configuration,
    prompts_of,
    running,
)
from test.benchmark.parallel.cells import cell_of


def test_every_other_round_is_served_in_reverse_order() -> None:
    cells = cells_of(NAMES, [1, 4], [2, 4], 3, 0)
    rounds = [
        [(cell["in_flight"], cell["k"], cell.config) for cell in cells if cell.round == number]
        for number in (1, 2, 3)
    ]
    assert rounds[0] == rounds[2] == rounds[1][::-1]
    assert list(dict.fromkeys(cell[:2] for cell in rounds[0] if cell[1])) == [
        *((2, 1), (2, 4)),
        *((4, 1), (4, 4)),
    ]


def test_configurations_without_k_are_served_only_with_the_largest_k() -> None:
    cells = cells_of(NAMES, [1, 8], [4], 1, 0)
    served = [(cell.config, cell["k"]) for cell in cells]
    assert [name for name, k in served if k is None] == list(BASELINES[::-1])
    assert served.index(("none", None)) > served.index(("halves", 1))
    assert {(name, k) for name in PIPELINES for k in (1, 8)} < set(served)


def test_a_single_request_has_no_halves() -> None:
    cells = cells_of(NAMES, [4], [1], 1, 0)
    assert set(NAMES) - {cell.config for cell in cells} == {"halves", "sequential-half"}
    assert cells_of(["halves"], [4], [1], 1, 0) == []


def test_the_papers_comparison_runs_half_of_the_requests() -> None:
    assert [running(name, 8) for name in ("halves", "sequential-half")] == [8, 4]


def test_streaming_has_separate_rounds_at_one_k_and_fewer_configurations() -> None:
    cells = [cell for cell in cells_of(NAMES, [1, 3, 8], [2, 4], 1, 2) if cell["streamed"]]
    assert list(dict.fromkeys((cell.round, cell["in_flight"]) for cell in cells)) == [
        *((1, 4), (1, 2)),
        *((2, 2), (2, 4)),
    ]
    assert {cell["k"] for cell in cells} == {3, None}
    assert {cell.config for cell in cells} == set(NAMES) - {"none-equal", "sequential-half"}


def test_prompts_rotate_over_groups_and_differ_by_round_but_not_by_k() -> None:
    prompts = mixed({"qa": [f"q{n}" for n in range(30)], "rag": ["r0"]})
    assert prompts[:3] == ["q0", "r0", "q1"]
    one, other, second, streamed, small = (
        prompts_of(cell, prompts, 3)
        for cell in (
            cell_of("halves", k=1),
            cell_of("halves", k=8),
            cell_of("halves", number=2, k=1),
            cell_of("halves", k=1, streamed=True),
            cell_of("halves", in_flight=1, k=1),
        )
    )
    assert one == other
    assert not set(one) & set(second)
    assert [len(found) for found in (one, second, streamed, small)] == [12, 12, 4, 6]


def test_a_cell_with_too_few_prompts_serves_each_once() -> None:
    assert prompts_of(cell_of("auto", number=2, in_flight=8), ["a", "b", "c"], 3) == ["a", "b", "c"]


def test_each_pipeline_is_served_with_its_own_draft_sources_and_width() -> None:
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


def test_the_pipelines_of_the_plan_are_those_of_the_server() -> None:
    from sglang_qspec.config import MODES

    for name, pipeline in PIPELINES.items():
        assert MODES[pipeline.mode] == name.split("-")[0]


def test_there_are_three_servers_and_one_has_a_sidecar() -> None:
    settings = Settings(Path("target"), Path("draft"), "bfloat16", 32, 384, False, (3,), (5,))
    every = {name: configuration(name, settings, 16) for name in NAMES}
    assert len({one.server_key for one in every.values()}) == 3
    for name, chosen in every.items():
        assert chosen.has_sidecar == (name not in BASELINES)
        assert chosen.cores == ((3, 5) if name == "none-equal" else (3,))
    flags = every["halves"].flags
    assert flags[flags.index("--speculative-qspec-cores") + 1] == "5"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "16"
