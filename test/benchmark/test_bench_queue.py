"""The command: its options, the order of its work, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmark import bench_queue
from benchmark.bench_queue import Run, load_of, parse
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import Prompt
from benchmark.harness.fleet import Fleet
from benchmark.harness.server import Server, ServerError, reason
from benchmark.queueing import serving
from benchmark.queueing.configurations import configuration
from benchmark.queueing.journal import Entry, Journal
from benchmark.queueing.load import Block, Load
from benchmark.queueing.serving import BlockRun, Queue
from test.benchmark.runs import answer, run

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, on_gpu=False)
BLOCKS = tuple(Block("qa", part, ("Who?",)) for part in range(3))
LOAD = Load(BLOCKS, max_new_tokens=8, request_rate=float("inf"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slots", "0"],
        ["--request-rate", "0"],
        ["--configs", "qspec-3"],
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


def test_a_dataset_that_cannot_be_read_ends_with_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench_queue: error: .*absent\.jsonl"):
        bench_queue.main(["--dataset", str(tmp_path / "absent.jsonl")])


@dataclass
class Measured:
    """Serves nothing, and keeps what it was asked to serve."""

    served: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Configurations whose next attempts fail."""

    def serve(self, _: Server, chosen: Configuration, block: Block, load: Load) -> BlockRun:
        self.served.append(f"{chosen.name} {block.part}")
        if chosen.name in self.broken:
            self.broken.remove(chosen.name)
            raise ServerError("the server ended with code 1:\nValueError: no kernel")
        return run(answer(), part=block.part)[0]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    measured = Measured()
    monkeypatch.setattr(bench_queue, "serve", measured.serve)
    monkeypatch.setattr(Fleet, "run", lambda *_: None)
    return measured


def test_every_block_is_served_by_all_in_an_order_that_turns_around(
    measured: Measured, tmp_path: Path
) -> None:
    journal = Journal.open(tmp_path, {}, resume=False)
    Run(["none", "lookup", "qspec-8"], SETTINGS, LOAD, 1, journal).serve(Fleet(None))
    assert measured.served == [
        *("none 0", "lookup 0", "qspec-8 0"),
        *("qspec-8 1", "lookup 1", "none 1"),
        *("none 2", "lookup 2", "qspec-8 2"),
    ]
    assert [f"{e.config} {e.run.part}" for e in journal.entries] == measured.served


def test_a_resumed_run_serves_only_what_is_missing(measured: Measured, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, {}, resume=False)
    for name, part in (("none", 0), ("lookup", 0), ("lookup", 1)):
        journal.add(Entry(1, name, run(answer(), part=part)[0]))
    Run(["none", "lookup"], SETTINGS, LOAD, 1, journal).serve(Fleet(None))
    assert measured.served == ["none 1", "none 2", "lookup 2"]


def test_a_block_that_fails_is_served_again_and_its_configuration_left_out_if_it_fails_twice(
    measured: Measured, tmp_path: Path
) -> None:
    measured.broken = ["none", "lookup", "lookup"]
    this = Run(["none", "lookup"], SETTINGS, LOAD, 1, Journal.open(tmp_path, {}, resume=False))
    this.serve(Fleet(None))
    assert measured.served == ["none 0", "none 0", "lookup 0", "lookup 0", "none 1", "none 2"]
    assert this.failed == {"lookup": "ValueError: no kernel"}


class Flaky:
    """A server whose first answers are errors."""

    def __init__(self, *errors: Exception | str) -> None:
        self._errors = list(errors)
        self.bodies: list[Any] = []

    def post(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.bodies.append(body)
        meta: dict[str, Any] = {"e2e_latency": 1.0, "queue_time": 0.0, "finish_reason": None}
        if self._errors:
            error = self._errors.pop(0)
            if isinstance(error, Exception):
                raise error
            meta["finish_reason"] = {"type": error, "message": "out of memory"}
        return {"output_ids": [1, 2], "meta_info": meta}


def queue(server: Any, name: str = "none") -> Queue:
    return Queue(server, configuration(name, SETTINGS), BLOCKS[0], LOAD)


@pytest.mark.parametrize("error", [ServerError("HTTP 500"), ConnectionResetError(), "abort"])
def test_a_request_that_fails_is_sent_once_more_and_counted(error: Exception | str) -> None:
    asked = queue(Flaky(error))
    _, answers = asked.serve()
    assert [a.output_ids for a in answers] == [(1, 2)]
    assert asked.retried == 1
    with pytest.raises((ServerError, OSError)):
        queue(Flaky(error, error)).serve()


class LostSidecar(Flaky):
    """A server whose sidecar drafts 7 tokens for each request, from the second warm-up on."""

    def __init__(self) -> None:
        super().__init__()
        self.drafted = 0

    def get(self, path: str) -> dict[str, Any]:
        return {
            "internal_states": [{"qspec": {"drafted_tokens": self.drafted, "drafting_rows": 0}}]
        }

    def post(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> dict[str, Any]:
        if path != "/generate":
            return {}
        answer = super().post(path, body, timeout)
        self.drafted += 7 * (len(self.bodies) > 2 * SETTINGS.slots)
        return answer


def test_a_block_is_served_once_the_sidecar_drafts_and_counts_only_its_own_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "SETTLE_SECONDS", 0.3)
    server: Any = LostSidecar()
    chosen = configuration("qspec-8", SETTINGS)
    measured = serving.serve(server, chosen, BLOCKS[0], LOAD)
    assert measured.drafted == 7
    assert len(server.bodies) == 2 * 2 * SETTINGS.slots + 1


def test_requests_ask_for_their_number_of_completions() -> None:
    few, most = Flaky(), Flaky()
    queue(few, "qspec-2").serve()
    queue(most, "qspec-8").serve()
    assert few.bodies[0]["sampling_params"]["custom_params"] == {"qspec_completions": 2}
    assert "custom_params" not in most.bodies[0]["sampling_params"]


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
    assert load.blocks == (Block("qa", 0, ("a" * 9, "c")),)
    assert skipped == {"qa": 1, "rag": 1}
