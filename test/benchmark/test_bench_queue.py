"""The command: its options, the order of its rounds, and configurations that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import bench_queue
from benchmark.bench_queue import load_of, parse, reason, run_rounds
from benchmark.queueing.configurations import Configuration, Settings
from benchmark.queueing.dataset import Prompt
from benchmark.queueing.serving import GroupRun, Load
from benchmark.server import ServerError
from test.benchmark.runs import answer, run

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, on_gpu=False)
LOAD = Load({"qa": ["Who?"]}, max_new_tokens=8, request_rate=float("inf"))


@pytest.mark.parametrize(
    "arguments",
    [["--slots", "0"], ["--request-rate", "0"], ["--configs", "qspec-3"], ["--model", "m"]],
)
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--dataset", "d.jsonl", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_a_dataset_that_cannot_be_read_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench_queue: error: .*absent\.jsonl"):
        bench_queue.main(["--dataset", str(tmp_path / "absent.jsonl")])


def test_rounds_go_forwards_and_backwards_and_leave_out_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = []

    def serve(configuration: Configuration, load: Load, progress: str) -> list[GroupRun]:
        served.append(configuration.name)
        if configuration.name == "ngram":
            raise ServerError("the server ended with code 1:\nValueError: no kernel")
        return run(answer())

    monkeypatch.setattr(bench_queue, "serve", serve)
    rounds, failed = run_rounds(["none", "ngram", "lookup"], SETTINGS, LOAD, 3)
    assert served == ["none", "ngram", "lookup", "lookup", "none", "none", "lookup"]
    assert [set(one) for one in rounds] == [{"none", "lookup"}] * 3
    assert failed == {"ngram": "ValueError: no kernel"}


def test_the_reason_of_a_failure_is_the_last_line_that_names_an_error() -> None:
    log = "the server ended with code 1:\nloading\nValueError: no such kernel\nbye"
    assert reason(RuntimeError(log)) == "ValueError: no such kernel"
    assert reason(ConnectionResetError()) == "ConnectionResetError"


def test_prompts_that_do_not_fit_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        """A token for each character."""

        input_ids: str

        @classmethod
        def from_pretrained(cls, _: Path) -> Tokenizer:
            return cls()

        def __call__(self, text: str) -> Tokenizer:
            self.input_ids = text
            return self

    monkeypatch.setattr("transformers.AutoTokenizer", Tokenizer)
    monkeypatch.setattr(bench_queue, "render", lambda _, prompts: prompts)
    groups = {
        "qa": [Prompt("qa", text) for text in ("a" * 9, "b" * 10, "c", "d")],
        "rag": [Prompt("rag", "e" * 99)],
    }
    options = parse(
        ["--dataset", "d", "--max-new-tokens", "10", "--context-length", "20", "--num-prompts", "2"]
    )
    settings = Settings(Path("target"), Path("draft"), "float32", 2, 20, on_gpu=False)
    load, skipped = load_of(groups, settings, options)
    assert load.prompts == {"qa": ["a" * 9, "c"]}
    assert skipped == {"qa": 1, "rag": 1}
