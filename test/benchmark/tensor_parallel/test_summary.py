"""The cells and the figures of `bench_tensor_parallel`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.bench_tensor_parallel import parse
from benchmark.harness.configuration import Settings
from benchmark.harness.run import Answer, Run
from benchmark.tensor_parallel.cells import NONE, QSPEC, Cell, cells_of, configuration
from benchmark.tensor_parallel.summary import Summary

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 512, False)


def test_both_servers_have_the_ranks_and_the_plugin() -> None:
    for name in (NONE, QSPEC):
        found = configuration(Cell(1, 0.0, name), SETTINGS, 3, {"KEY": "value"})
        assert found.flags[found.flags.index("--tp-size") + 1] == "3"
        server = found.server()
        assert server._environment["KEY"] == "value"
        assert server._environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 2
        assert found.has_sidecar is (name == QSPEC)


def test_figures_are_for_each_output_token_and_over_no_speculation() -> None:
    def run(seconds: float, operations: int) -> Run:
        answer = Answer((1, 2, 3, 4), 1.0, 1.0, 3)
        return Run(seconds, (answer,), collectives=operations, collective_bytes=400)

    runs = {}
    for cell in cells_of([0.0, 1.0], 2):
        slow = 1.0 + cell.delay_ms
        plain = cell.config == NONE
        runs[cell] = run(slow if plain else slow / (2 + cell.delay_ms), 248 if plain else 62)
    record = Summary(runs).record()
    assert record["collectives_per_token"] == {NONE: 62.0, QSPEC: 15.5}
    found = record["speedup_by_delay_ms"]
    assert {delay: ratio["speedup"] for delay, ratio in found.items()} == {"0": 2.0, "1": 3.0}
    assert {row["bytes_per_token"] for row in record["rows"]} == {100.0}


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--delays", "-1"]])
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--dataset", "d.jsonl", *arguments])
    assert arguments[0] in capsys.readouterr().err
