"""The server's own parser accepts the flags of every benchmark, and its defaults fit them.

On a GPU the platform is mocked, as in `test.engine.test_gpu_defaults`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from benchmark import bench_soak, bench_worst_case
from benchmark.gpu_check import speedup
from benchmark.harness import standin
from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Configuration, Settings, with_and_without
from benchmark.harness.options import add_servers, add_unpinned, parsed, settings_of
from benchmark.peers import servers
from benchmark.peers.servers import ALWAYS, OWN, Programs
from benchmark.queueing import configurations
from benchmark.worst.cases import CASES
from sglang_qspec.engine.placement import environment
from sglang_qspec.tools.models import DemoModels
from test.engine.test_gpu_defaults import cuda, resolved

CPU = Settings(Path("target"), Path("draft"), "bfloat16", 4, 2048, False, (0,), (1,))
GPU = replace(CPU, on_gpu=True, target_cores=(), sidecar_cores=())


def all_of(settings: Settings) -> Iterator[tuple[str, Configuration]]:
    """The name of each benchmark with each of its configurations."""
    for name in configurations.NAMES:
        yield "queue", configurations.configuration(name, settings)
    # The start on a GPU reads the checkpoints, and there is none of a head.
    for name in ALWAYS if settings.on_gpu else OWN:
        yield "peers", servers.configuration(name, settings, Programs(), 16)
    for case in CASES:
        for config in ("none", "adaptive"):
            cell = Cell.of(1, config, case=case.name, in_flight=4)
            yield "worst_case", bench_worst_case.configuration(cell, settings, "ipc:///wrong")
    own = {
        "demo": with_and_without(settings, "--speculative-qspec-completions", "8"),
        "overhead": with_and_without(settings),
        "soak": bench_soak.configurations(settings),
        "speedup": speedup.configurations(settings, 128),
    }
    for benchmark, both in own.items():
        for configuration in both:
            yield benchmark, configuration


def distinct(settings: Settings) -> dict[tuple[str, ...], tuple[str, Configuration]]:
    """All configurations with different flags, by the flags without the port."""
    found: dict[tuple[str, ...], tuple[str, Configuration]] = {}
    for name, configuration in all_of(settings):
        command = configuration.server().command
        key = tuple(command[command.index("--model-path") : -2])
        found.setdefault(key, (f"{name} {configuration.name}", configuration))
    return found


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    from sglang_qspec.engine.start.flags import add_flags

    # By default argparse accepts a prefix of a flag as the flag.
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if not any("--speculative-qspec-cores" in a.option_strings for a in parser._actions):
        add_flags(None, parser)
    return parser


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["cpu", "cuda"])
def test_the_server_takes_every_flag(settings: Settings, parser: argparse.ArgumentParser) -> None:
    for arguments, (name, configuration) in distinct(settings).items():
        parsed = parser.parse_args(arguments)
        assert (parsed.speculative_algorithm == "QSPEC") >= configuration.has_sidecar, name


def test_the_parser_rejects_a_flag_that_does_not_exist(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--speculative-qspec-device", "cuda:0"])


@pytest.mark.parametrize(
    ("sm", "dtype"), [(80, "bfloat16"), (90, "bfloat16"), (90, "float32"), (100, "float32")]
)
def test_on_a_gpu_sglang_accepts_every_benchmark_and_has_kernels_for_its_dtype(
    models: DemoModels, parser: argparse.ArgumentParser, sm: int, dtype: str
) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    # The draft model that the benchmarks make for a GPU has the target's format too.
    settings = replace(GPU, model=models.target, draft_model=models.target, dtype=dtype)
    for arguments, (name, _) in distinct(settings).items():
        # The settings of QSPEC and the placement are in the environment.
        with cuda(sm), mock.patch.dict(os.environ):
            view = resolved(ServerArgs.from_cli_args(parser.parse_args(arguments)))
            sidecar = environment.read()
        assert view.dtype == dtype, name
        assert (view.attention_backend == "triton") == (dtype == "float32"), name
        share = float(speedup.MEM_FRACTION) if name.startswith("speedup") else 0.5
        assert view.mem_fraction_static == share, name
        if "--speculative-draft-model-path" in arguments:
            assert sidecar is not None, name
            assert sidecar.device == "cuda:0"
            assert share + sidecar.mem_fraction <= 0.95
        if "QSPEC" in arguments:
            # A pass has at most 768 rows, unless the benchmark asks for more.
            rows = view.max_running_requests * view.speculative_num_draft_tokens
            assert rows <= 768 or "--max-running-requests" in arguments
            assert view.page_size == 1


def test_on_a_gpu_the_demo_draft_has_weights_that_its_kernels_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def demo_models(*, on_cuda: bool = False) -> DemoModels:
        asked.append(on_cuda)
        return DemoModels(Path("t"), Path("d"))

    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("sglang_qspec.tools.models.demo_models", demo_models)
    parser = argparse.ArgumentParser()
    add_servers(parser, "bfloat16")
    settings = settings_of(parser.parse_args(["--flags=--a 'b c'"]), 4, 2048)
    assert (asked, settings.on_gpu) == ([True], True)
    assert settings.arguments()[-2:] == ["--a", "b c"]


def test_unpinned_servers_may_use_all_processors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    parser = argparse.ArgumentParser()
    add_servers(parser, "bfloat16")
    add_unpinned(parser)
    given = ["--model", "t", "--draft-model", "d", "--cpu"]
    assert settings_of(parsed(parser, given), 4, 2048).all_cores == (0, 1)
    unpinned = settings_of(parsed(parser, [*given, "--unpinned"]), 4, 2048)
    assert unpinned.all_cores == ()
    assert "--speculative-qspec-cores" not in unpinned.qspec()
    with pytest.raises(SystemExit):
        parsed(parser, [*given, "--unpinned", "--target-cores", "0", "--sidecar-cores", "1"])
    assert "--unpinned and --target-cores exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "dtype", "replaced"),
    [(GPU, "float32", True), (GPU, "bfloat16", False), (CPU, "float32", False)],
)
def test_only_servers_in_float32_on_a_gpu_find_the_stand_ins(
    settings: Settings, dtype: str, replaced: bool
) -> None:
    server = Configuration("any", replace(settings, dtype=dtype)).server()
    path = server._environment.get("PYTHONPATH", "").split(os.pathsep)
    assert (str(standin.FOLDER) in path) == replaced
    assert (standin.BACKEND in server.command) == replaced
