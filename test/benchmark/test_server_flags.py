"""The server's own parser accepts the flags of every benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from benchmark import bench_soak, bench_worst_case
from benchmark.harness.configuration import Configuration, Settings, with_and_without
from benchmark.parallel import plan
from benchmark.queueing import configurations
from benchmark.worst.cases import CASES, Cell

CPU = Settings(Path("target"), Path("draft"), "bfloat16", 4, 2048, False, (0,), (1,))
GPU = replace(CPU, on_gpu=True, target_cores=(), sidecar_cores=())


def all_of(settings: Settings) -> Iterator[tuple[str, Configuration]]:
    """The name of each benchmark with each of its configurations."""
    for name in configurations.NAMES:
        yield "queue", configurations.configuration(name, settings)
    for name in plan.NAMES:
        yield "batch_parallel", plan.configuration(name, settings, 16)
    for case in CASES:
        for config in ("none", "adaptive"):
            cell = Cell(1, case.name, 4, config)
            yield "worst_case", bench_worst_case.configuration(cell, settings, "ipc:///wrong")
    own = {
        "demo": with_and_without(settings, "--speculative-qspec-completions", "8"),
        "faults and overhead": with_and_without(settings),
        "soak": bench_soak.configurations(settings),
    }
    for benchmark, both in own.items():
        for configuration in both:
            yield benchmark, configuration


EVERY = [
    pytest.param(found, id=f"{benchmark} {found.name} on {'cuda' if settings.on_gpu else 'cpu'}")
    for settings in (CPU, GPU)
    for benchmark, found in all_of(settings)
]


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    from sglang_qspec.engine.arguments import add_flags

    # Otherwise argparse accepts a prefix of a flag as the flag.
    parser = Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if not any("--speculative-qspec-cores" in a.option_strings for a in parser._actions):
        add_flags(None, parser)
    return parser


@pytest.mark.parametrize("configuration", EVERY)
def test_the_server_takes_every_flag(
    configuration: Configuration, parser: argparse.ArgumentParser
) -> None:
    arguments = configuration.server().command
    parsed = parser.parse_args(arguments[arguments.index("--model-path") :])
    assert (parsed.speculative_algorithm == "QSPEC") >= configuration.has_sidecar


def test_the_parser_rejects_a_flag_that_does_not_exist(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ValueError, match="--speculative-qspec-device"):
        parser.parse_args(["--model-path", "m", "--speculative-qspec-device", "cuda:0"])
