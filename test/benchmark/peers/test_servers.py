"""The servers of `bench_peers`, and their prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.bench_peers import parse
from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import lengths_of
from benchmark.peers.loads import cells_of, prompts_of
from benchmark.peers.pipelines import BASELINE, PIPELINES
from benchmark.peers.servers import (
    AGAIN,
    ALWAYS,
    BESIDE,
    HEAD,
    LOOKUPS,
    NAMES,
    OWN,
    PINNED,
    QSPEC,
    SGLANG,
    STEPS,
    Programs,
    configuration,
)

SETTINGS = Settings(Path("target"), Path("draft"), "bfloat16", 16, 768, False, (0,), (1,))
ALL = Programs(
    Path("python"),
    Path("llama-server"),
    Path("python3"),
    Path("target.gguf"),
    Path("draft.gguf"),
    Path("head"),
)


def test_peers_run_only_if_the_command_line_names_them() -> None:
    assert Programs().names == ALWAYS
    assert ALL.names == NAMES


def test_all_servers_but_the_pinned_ones_use_all_processors() -> None:
    every = {name: configuration(name, SETTINGS, ALL, 16) for name in NAMES}
    pinned = {name for name, one in every.items() if one.cores == (0,)}
    assert pinned == {PINNED, BASELINE, HEAD, BESIDE, *PIPELINES}
    assert {one.cores for name, one in every.items() if name not in pinned} == {()}
    assert "--speculative-qspec-cores" not in every[QSPEC].flags
    assert every[SGLANG].flags == every[BASELINE].flags == ()
    # All pipelines share a server.
    assert len({one.server_key for one in every.values()}) == len(NAMES) - len(PIPELINES) + 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN])
def test_a_peer_takes_as_many_requests_on_a_port_of_its_own(name: str) -> None:
    server = configuration(name, SETTINGS, ALL, 16).server()
    assert server.command[-1] == str(server.port)
    assert "16" in server.command


def test_rounds_reverse_and_no_prompt_comes_twice() -> None:
    given = ("--dataset", "d", "--levels", "1", "4", "--configs", SGLANG, QSPEC, "--rounds", "2")
    options = parse([*given, "--arrivals", "steady", "queue", "--prompts", "24"])
    cells = cells_of(options)
    assert [cell.config for cell in cells] == [SGLANG, QSPEC] * 4 + [QSPEC, SGLANG] * 4
    prompts = [[number] for number in range(300)]
    served = [
        prompt[0]
        for cell in cells
        if cell.config == QSPEC
        for part in prompts_of(cell, prompts, options)
        for prompt in part
    ]
    assert len(served) == len(set(served)) == 2 * (2 * 24 + 1 + 4 + 3 + 1 + 12 + 4)


def test_the_matrix_has_sampled_and_constrained_answers_of_sglang_alone() -> None:
    options = parse(["--dataset", "d", "--matrix", "--vllm", "python", "--levels", "2"])
    assert options.configs == (QSPEC, SGLANG, AGAIN, LOOKUPS, STEPS)
    options.configs = NAMES
    kinds = {cell["sampling"]: set[str]() for cell in cells_of(options)}
    for cell in cells_of(options):
        kinds[cell["sampling"]].add(cell.config)
    assert kinds == {"greedy": set(NAMES), "sampled": set(OWN), "json": set(OWN)}


def test_lengths_of_answers_depend_on_the_prompt_and_keep_to_the_spread() -> None:
    prompts = [[number] for number in range(500)]
    assert lengths_of(prompts, 128, 0.0) == [128] * 500
    lengths = lengths_of(prompts, 128, 0.5)
    assert lengths[100:] == lengths_of(prompts[100:], 128, 0.5)
    assert min(lengths) in range(64, 70)
    assert max(lengths) in range(186, 193)
    assert sum(lengths) / 500 == pytest.approx(128, rel=0.05)
