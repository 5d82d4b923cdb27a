"""The command: its options, the order of its work, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmark import bench_batch_parallel
from benchmark.bench_batch_parallel import header_of, parse, plan_of, settings_of
from benchmark.harness.configuration import Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import JournalError
from benchmark.harness.server import Server, ServerError
from benchmark.parallel import run as run_module
from benchmark.parallel.journal import Journal
from benchmark.parallel.run import Run
from benchmark.parallel.serving import CellRun, Task
from test.benchmark.parallel.cells import run_of

SETTINGS = Settings(Path("target"), Path("draft"), "bfloat16", 32, 384, on_gpu=False)
PROMPTS = [f"prompt {number}" for number in range(40)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--k", "0"],
        ["--in-flight", "3"],
        ["--rounds", "0"],
        ["--streaming-rounds", "-1"],
        ["--configs", "thirds"],
        ["--model", "m"],
        ["--sidecar-cores", "1"],
        ["--target-cores", "x"],
        ["--resume"],
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--dataset", "d.jsonl", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_numbers_are_served_once_and_in_order() -> None:
    options = parse(["--dataset", "d", "--k", "8", "2", "8", "--in-flight", "4", "1"])
    assert (options.k, options.in_flight) == ([2, 8], [1, 4])


def test_a_dataset_that_cannot_be_read_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench_batch_parallel: error: .*absent\.jsonl"):
        bench_batch_parallel.main(["--dataset", str(tmp_path / "absent.jsonl")])


@dataclass
class Measured:
    """Serves nothing, and keeps what it was asked to serve."""

    served: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Configurations whose next attempts fail."""

    def serve(self, _: Server, task: Task) -> CellRun:
        self.served.append(f"{task.config} {task.k} {task.running}")
        if task.config in self.broken:
            self.broken.remove(task.config)
            raise ServerError("the server ended with code 1:\nValueError: no kernel")
        return run_of()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    measured = Measured()
    monkeypatch.setattr(run_module, "serve", measured.serve)
    monkeypatch.setattr(Fleet, "run", lambda *_: None)
    return measured


def run(folder: Path, *arguments: str, resume: bool = False) -> Run:
    options = parse(
        ["--dataset", "d", "--streaming-rounds", "0", "--in-flight", "4", "--k", "2", *arguments]
    )
    journal = Journal.open(folder, {"prompts": "a"}, resume)
    return Run(SETTINGS, 16, plan_of(PROMPTS, options), journal)


def test_configurations_take_turns_in_an_order_that_turns_around(
    measured: Measured, tmp_path: Path
) -> None:
    configs = ["--configs", "halves", "none", "sequential-half"]
    run(tmp_path, *configs, "--rounds", "2").serve(Fleet(None))
    first = ["none 2 4", "halves 2 4", "sequential-half 2 2"]
    assert measured.served == [*first, *first[::-1]]


def test_a_resumed_run_serves_only_what_is_missing_and_may_serve_more(
    measured: Measured, tmp_path: Path
) -> None:
    run(tmp_path, "--configs", "halves", "none", "--rounds", "1").serve(Fleet(None))
    measured.served.clear()
    more = ["--configs", "halves", "none", "--k", "2", "4", "--rounds", "2"]
    run(tmp_path, *more, resume=True).serve(Fleet(None))
    # The baseline does not depend on k, so it has served the first round.
    assert measured.served == ["halves 4 4", "halves 4 4", "none 4 4", "halves 2 4"]


def test_a_cell_that_fails_is_served_again_and_its_configuration_left_out_if_it_fails_twice(
    measured: Measured, tmp_path: Path
) -> None:
    measured.broken = ["none", "halves", "halves"]
    this = run(tmp_path, "--configs", "none", "ahead", "halves", "--rounds", "2")
    this.serve(Fleet(None))
    assert measured.served == [
        *("none 2 4", "none 2 4", "ahead 2 4", "halves 2 4", "halves 2 4"),
        *("ahead 2 4", "none 2 4"),
    ]
    assert this.failed == {"halves": "ValueError: no kernel"}


def test_a_run_can_go_on_with_other_numbers_but_not_with_other_lengths(tmp_path: Path) -> None:
    def header(*arguments: str) -> dict[str, str]:
        models = ["--model", "m", "--draft-model", "d"]
        options = parse(["--dataset", "d", "--cpu", *models, *arguments])
        return header_of(settings_of(options), PROMPTS, options)

    Journal.open(tmp_path, header("--k", "4", "--in-flight", "4"), resume=False)
    Journal.open(tmp_path, header("--k", "1", "8", "--rounds", "3"), resume=True)
    with pytest.raises(JournalError, match="max_new_tokens is 128, and that of this run 127"):
        Journal.open(tmp_path, header("--max-new-tokens", "127"), resume=True)
