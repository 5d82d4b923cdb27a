"""The parts with servers judge the answers of made-up servers."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.gpu_check import loads, passes, serving
from benchmark.gpu_check.findings import Options, Steps
from benchmark.gpu_check.serving import Passes
from benchmark.harness.configuration import Settings
from sglang_qspec.engine.cuda import pass_graphs

CPU = Options("cpu", emulated=True)
GPU = Options("cuda", emulated=False, flags=("--a", "b c"))
SETTINGS = Settings(Path("target"), Path("draft"), "float32", 4, 2048, True)


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "demo_settings", lambda *_: SETTINGS)
    monkeypatch.setattr(passes, "render", lambda _model, prompts: list(prompts))


@pytest.mark.parametrize(
    ("different", "accepted", "failed"),
    [([], 5, []), ([1, 3], 5, ["greedy"]), ([], 0, ["drafts"])],
    ids=["equal", "different", "without drafts"],
)
def test_parity_needs_equal_answers_and_accepted_drafts(
    monkeypatch: pytest.MonkeyPatch, different: list[int], accepted: int, failed: list[str]
) -> None:
    line = {
        "identical": not different,
        "different": different,
        "tokens_per_s": [60.0, 120.0],
        "accept_len": 2.25,
        "accepted_by_source": {"step": accepted},
    }
    monkeypatch.setattr(loads, "run", lambda *_: line)
    steps = Steps()
    loads.parity(GPU, steps)
    assert steps.found.identical == (not different)
    assert steps.found.figures["different"] == different
    assert list(steps.found.failed) == failed


class Server:
    """Runs a pass for each request, and those with `eager_for` outside graphs."""

    log = "INFO: Target passes run in CUDA graphs: 1, 8. Those beside took 3 s.\nready\n"

    def __init__(self) -> None:
        self.total = self.eager = 0
        self.eager_for = ""
        """A sampling parameter."""
        self.changed: list[dict[str, int]] = []
        self.gap: float | None = None
        """Difference of the log probabilities where drafts change an answer; None for no change."""

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/set_internal_state":
            self.changed.append(body["server_args"])
            return [True]
        asked = body["sampling_params"]
        self.total += len(asked)
        self.eager += sum(self.eager_for in one for one in asked)
        off = [bool(one.get("custom_params")) for one in asked]
        top = [[-0.5, 1, None], [-0.5 - (self.gap or 0.0), 2, None]]
        return [
            {
                "output_ids": [len(text), 1 if plain or self.gap is None else 2],
                "meta_info": {"output_top_logprobs": [top, top]},
            }
            for text, plain in zip(body["text"], off, strict=True)
        ]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    @contextmanager
    def start(_configuration: object) -> Iterator[Server]:
        yield made

    monkeypatch.setattr("benchmark.harness.configuration.Configuration.server", start)
    monkeypatch.setattr(passes, "wait_for_sidecar", lambda _server: None)
    monkeypatch.setattr(passes, "passes_of", lambda server: Passes(server.total, server.eager))
    monkeypatch.setattr(passes, "check_first_tokens", lambda *_: None)
    monkeypatch.setattr(passes, "capability", lambda: (8, 0))
    return made


@pytest.mark.parametrize("options", [GPU, CPU], ids=["gpu", "emulated"])
def test_mixes_with_passes_outside_graphs_are_named(server: Server, options: Options) -> None:
    server.eager_for = "frequency_penalty"
    steps = Steps()
    passes.passes(options, steps)
    assert list(steps.found.failed) == ["graphs"]
    assert steps.found.failed["graphs"].endswith("outside CUDA graphs: penalties, mixed")
    assert steps.found.eager_passes == server.eager == 16 + 2  # the fifth of six in turn
    assert steps.found.figures["passes"]["greedy"] == {"total": 16, "eager": 0}
    assert steps.found.figures["equal_bfloat16_answers"] == 1.0
    (line,) = steps.found.figures["captured"]
    assert line == "Target passes run in CUDA graphs: 1, 8. Those beside took 3 s."
    # The pipeline, and then all drafts while sampled texts are compared.
    changed = [("qspec_mode", 2), ("qspec_mode", 4), ("qspec_fixed_width", 1)]
    assert server.changed == [dict([each]) for each in (*changed, ("qspec_fixed_width", 0))]
    assert {"counted", "bfloat16 answers"} <= set(steps.found.passed)


def test_the_passes_of_all_pipelines_are_counted() -> None:
    pipelines = {"queue": {"passes": 4}, "ahead": {"passes": 5}}
    info = {"internal_states": [{"qspec": {"pipelines": pipelines, "eager_passes": 1}}]}
    server: Any = SimpleNamespace(get=lambda *_: info)
    assert serving.passes_of(server).since(Passes(4, 1)) == Passes(5, 0)


def test_the_log_says_what_was_captured_and_what_did_not_fit() -> None:
    """The source has both messages."""
    source = inspect.getsource(pass_graphs)
    for start in ("Target passes run in CUDA graphs", "No CUDA graphs for width"):
        assert start in source
        assert serving.captured(f"[03:00 INFO] {start}: 3 s\nmore") == [f"{start}: 3 s"]


@pytest.mark.parametrize("gap", [0.125, 0.75])
def test_drafts_may_change_an_answer_only_at_a_near_tie(server: Server, gap: float) -> None:
    server.gap = gap
    steps = Steps()
    passes.passes(CPU, steps)
    assert steps.found.figures["equal_bfloat16_answers"] == 0.0
    assert steps.found.figures["bfloat16_gaps"] == [gap] * 16
    assert list(steps.found.failed) == ([] if gap < passes.NEAR_TIE else ["bfloat16 answers"])


@pytest.mark.parametrize(("capability", "servers"), [(8, 1), (9, 2), (10, 1)])
def test_on_hopper_a_second_server_verifies_ragged_chains(
    server: Server, monkeypatch: pytest.MonkeyPatch, capability: int, servers: int
) -> None:
    monkeypatch.setattr(passes, "capability", lambda: (capability, 0))
    steps = Steps()
    passes.passes(Options("cuda", emulated=False), steps)
    assert (steps.found.eager_passes, steps.found.failed) == (0, {})
    assert len(steps.found.tables) == servers


def test_a_sampled_distribution_that_differs_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_server: object, params: dict[str, Any], _custom: object, _count: int) -> None:
        assert "min_p" not in params, "p = 1e-9"

    monkeypatch.setattr(passes, "check_first_tokens", check)
    steps = Steps()
    passes.passes(CPU, steps)
    assert list(steps.found.failed) == ["sampled min-p, frequency"]


def test_a_benchmark_gets_the_flags_and_its_line_of_json_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    row = {"config": "none", "tokens_per_s": 3.0, "speedup": None, "accept_len": 1.0}
    record: dict[str, Any] = {"rows": [row, {**row, "config": "qspec-8"}], "command": "c"}
    printed = f"a table\n{json.dumps(record)}\n"

    def run(command: list[str], **_: object) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, printed)

    monkeypatch.setattr(subprocess, "run", run)
    steps = Steps()
    loads.queue(GPU, steps)
    assert (commands[0][2], steps.found.passed) == ("benchmark.bench_queue", ["rows"])
    assert "--flags=--a 'b c'" in commands[0]
    assert "--cpu" not in commands[0]
    printed = json.dumps({**record, "failed": {"long-context": "no memory"}})
    loads.worst_case(CPU, steps)
    assert "--cpu" in commands[1]
    assert not any(argument.startswith("--flags") for argument in commands[1])
    assert "no memory" in steps.found.failed["cells"]
    printed = "Traceback\n"
    with pytest.raises(RuntimeError, match="bench_worst_case ended with 1"):
        loads.worst_case(CPU, Steps())


def test_the_flags_of_the_check_reach_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given = serving.settings(GPU, Path("t"), Path("d"), "bfloat16", 4, 2048)
    assert given.on_gpu
    assert given.arguments()[-2:] == ["--a", "b c"]
    on_cpu = serving.settings(CPU, Path("t"), Path("d"), "bfloat16", 4, 2048)
    assert "cpu" in on_cpu.arguments()
