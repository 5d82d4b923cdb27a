"""The command: its options, its servers, and that a cut run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import bench_worst_case
from benchmark.bench_worst_case import parse, serve, server_for
from benchmark.harness.configuration import Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.server import Server, ServerError
from benchmark.worst import wrong_sidecar
from benchmark.worst.cases import GUESSES, RANDOM, SIDECAR, SPEC_BENCH, Block, blocks_of
from benchmark.worst.journal import Journal
from benchmark.worst.loads import Load
from benchmark.worst.serving import CellRun, Client

SETTINGS = Settings(Path("target"), Path("draft"), "bfloat16", 32, 3584, False, (0,), (1,))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cases", "spec-bench"],
        ["--levels", "33"],
        ["--widths", "1"],
        ["--widths", "17"],
        ["--rounds", "0"],
        ["--cases", "sunshine"],
        ["--resume"],
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_spec_bench_is_served_where_there_is_a_dataset() -> None:
    assert SPEC_BENCH not in parse([]).cases
    assert SPEC_BENCH in parse(["--dataset", "d.jsonl"]).cases


def test_quick_is_less_of_everything_but_what_is_asked_for() -> None:
    quick = parse(["--quick", "--levels", "32"])
    assert (quick.levels, quick.rounds) == ([32], 1)
    assert quick.max_new_tokens < parse([]).max_new_tokens


def test_all_but_the_misled_sidecar_share_a_server_and_target_cores_are_the_same() -> None:
    def one(case: str, config: str) -> Any:
        return server_for(Block(1, case, 8, ()), config, SETTINGS, "ipc:///wrong")

    assert one(GUESSES, "adaptive").server_key == one(SPEC_BENCH, "width-4").server_key
    assert one(GUESSES, "none").server_key == one(SIDECAR, "none").server_key
    misled = one(SIDECAR, "adaptive")
    assert "ipc:///wrong" in misled.speculation
    keys = {one(case, "adaptive").cores for case in (GUESSES, SIDECAR, RANDOM)}
    assert keys == {one(RANDOM, "none").cores} == {(0,)}


class Loads:
    """The same load for all."""

    def of(self, case: str, running: int, number: int) -> Load:
        return Load(((1, 2),) * running, 8)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was served, by servers that are none; `width-4` fails the first time."""
    names: list[str] = []

    def answer(client: Client, server: Server, block: Block, config: str, load: Load) -> CellRun:
        names.append(f"{block.case} {block.running} {config}")
        if config == "width-4" and names.count(names[-1]) == 1:
            raise ServerError("it has crashed")
        return CellRun(1.0, 8, 4, 2, 1, 0.0, 0.0)

    monkeypatch.setattr(Client, "serve", answer)
    monkeypatch.setattr(Fleet, "run", lambda *_: None)
    monkeypatch.setattr(bench_worst_case, "vocab_size_of", lambda *_: 100)
    monkeypatch.setattr(wrong_sidecar, "running", None)
    return names


def test_what_is_in_the_journal_is_not_served_again_and_what_failed_is(
    served: list[str], tmp_path: Path
) -> None:
    blocks = blocks_of([RANDOM, SPEC_BENCH], [1], [2, 4], 1)
    journal = Journal.open(tmp_path, {"a": "b"}, resume=False)
    failed = serve(SETTINGS, blocks, Loads(), journal, 1.0)  # type: ignore[arg-type]
    assert failed == {"spec-bench, 1 in flight, width-4": "it has crashed"}
    assert len(served) == 6
    again = Journal.open(tmp_path, {"a": "b"}, resume=True)
    assert serve(SETTINGS, blocks, Loads(), again, 1.0) == {}  # type: ignore[arg-type]
    assert served[6:] == ["spec-bench 1 width-4"]
    assert len(again.entries) == 6
