"""The blocks of `bench_queue`, their order, and how it sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import bench_queue
from benchmark.harness import dataset, speculation
from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import fitting
from benchmark.harness.server import ServerError, reason
from benchmark.harness.serving import Sent, read_answer
from benchmark.queueing.configurations import configuration
from benchmark.queueing.load import Block, arrival_times, blocks_of, cells_of, measure, send

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, on_gpu=False)
BLOCKS = tuple(Block("qa", part, ("Who?",)) for part in range(3))
AT_ONCE = float("inf")


def test_an_unreadable_dataset_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    models = ["--model", "m", "--draft-model", "d"]
    with pytest.raises(SystemExit, match=r"bench_queue: error: .*absent\.jsonl"):
        bench_queue.main(["--dataset", str(tmp_path / "absent.jsonl"), *models])


def test_every_configuration_serves_every_block_in_alternating_order() -> None:
    cells = cells_of(BLOCKS, ["none", "lookup", "qspec-8"], 1)
    assert [f"{cell.config} {cell['part']}" for cell in cells] == [
        *("none 0", "lookup 0", "qspec-8 0"),
        *("qspec-8 1", "lookup 1", "none 1"),
        *("none 2", "lookup 2", "qspec-8 2"),
    ]
    # The fourth block is the first one of the second round.
    assert [cell.config for cell in cells_of(BLOCKS, ["none", "lookup"], 2)[6:8]] == [
        "lookup",
        "none",
    ]


class Flaky:
    """A server that answers its first requests with errors."""

    def __init__(self, *errors: Exception | str) -> None:
        self._errors = list(errors)
        self.bodies: list[Any] = []
        self.processes: list[Any] = []

    def post(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> Any:
        self.bodies.append(body)
        meta: dict[str, Any] = {"e2e_latency": 1.0, "queue_time": 0.0, "finish_reason": None}
        if self._errors:
            error = self._errors.pop(0)
            if isinstance(error, Exception):
                raise error
            meta["finish_reason"] = {"type": error, "message": "out of memory"}
        return {"output_ids": [1, 2], "meta_info": meta}


def sent_by(server: Any, name: str = "none") -> Sent:
    return send(server, configuration(name, SETTINGS), BLOCKS[0].prompts, 8, AT_ONCE)


@pytest.mark.parametrize("error", [ServerError("HTTP 500"), ConnectionResetError(), "abort"])
def test_a_request_that_fails_is_sent_once_more_and_counted(error: Exception | str) -> None:
    sent = sent_by(Flaky(error))
    assert [raw["output_ids"] for raw in sent.raw] == [[1, 2]]
    assert sent.retried == 1
    with pytest.raises((ServerError, OSError)):
        sent_by(Flaky(error, error))


class LostSidecar(Flaky):
    """A server with a sidecar that drafts 7 tokens per prompt, starting with the second warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.drafted = 0

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        state: dict[str, Any] = {"drafted_tokens": self.drafted, "drafting_rows": 0}
        state |= {"pipelines": {}, "step_seconds": 0.0, "step_passes": 0}
        return {"internal_states": [{"qspec": state}]}

    def post(self, path: str, body: dict[str, Any], timeout: float = 1.0) -> Any:
        if path != "/generate":
            return {}
        answer = super().post(path, body, timeout)
        self.drafted += 7 * (len(self.bodies) > 1)
        return answer


def test_a_block_is_served_once_the_sidecar_drafts_and_counts_only_its_own_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speculation, "DRAFTING_SECONDS", 0.3)
    monkeypatch.setattr(speculation, "SETTLED_SECONDS", 0.1)
    server: Any = LostSidecar()
    run = measure(server, configuration("qspec-8", SETTINGS), BLOCKS[0].prompts, 8, AT_ONCE)
    assert run.drafted == 7
    assert [len(body["text"]) for body in server.bodies[:2]] == [2 * SETTINGS.slots] * 2
    assert server.bodies[2]["text"] == "Who?"


def test_requests_ask_for_their_number_of_completions() -> None:
    few, most = Flaky(), Flaky()
    sent_by(few, "qspec-2")
    sent_by(most, "qspec-8")
    assert few.bodies[0]["sampling_params"]["custom_params"] == {"qspec_completions": 2}
    assert "custom_params" not in most.bodies[0]["sampling_params"]


def test_an_answer_is_read_by_the_kind_of_server_that_gave_it() -> None:
    meta: dict[str, Any] = {"e2e_latency": 5.0, "queue_time": 3.5}
    body = {"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}
    plain = read_answer(body, 6.0)
    assert (plain.passes, plain.proposed, plain.service, plain.latency) == (4, 0, 1.5, 6.0)
    # SGLang fills these in for QSPEC too; there only QSPEC's own record counts.
    meta |= {"spec_verify_ct": 2, "spec_num_proposed_drafts": 22, "spec_num_correct_drafts": 2}
    ngram = read_answer(body, 6.0)
    assert (ngram.passes, ngram.proposed, ngram.accepted) == (2, 22, {"ngram": 2})
    sources = {"queue": 1, "output": 0}
    meta["qspec"] = {"passes": 3, "proposed_tokens": 7, "accepted_by_source": sources}
    qspec = read_answer(body, 6.0)
    assert (qspec.passes, qspec.proposed, qspec.accepted) == (3, 7, sources)


def test_the_reason_of_a_failure_is_the_last_line_that_names_an_error() -> None:
    log = "the server ended with code 1:\nloading\nValueError: no such kernel\nbye"
    assert reason(RuntimeError(log)) == "ValueError: no such kernel"
    assert reason(ConnectionResetError()) == "ConnectionResetError"


def test_prompts_longer_than_the_context_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Tokenizer:
        """One token per character."""

        input_ids: str

        @classmethod
        def from_pretrained(cls, _: Path) -> Tokenizer:
            return cls()

        def __call__(self, text: str) -> Tokenizer:
            self.input_ids = text
            return self

    monkeypatch.setattr("transformers.AutoTokenizer", Tokenizer)
    monkeypatch.setattr(dataset, "render", lambda _, prompts: prompts)
    path = tmp_path / "prompts.jsonl"
    prompts = [("qa", "a" * 9), ("qa", "b" * 10), ("qa", "c"), ("rag", "e" * 99)]
    lines = (f'{{"group": "{group}", "prompt": "{text}"}}\n' for group, text in prompts)
    path.write_text("".join(lines))
    assert fitting("bench", path, Path("m"), 9) == (
        {"qa": ["a" * 9, "c"]},
        {"qa": 1, "rag": 1},
    )
    with pytest.raises(SystemExit, match="no prompt has at most 0 tokens"):
        fitting("bench", path, Path("m"), 0)


def test_groups_are_divided_into_a_few_blocks_of_nearly_equal_size() -> None:
    blocks = blocks_of({"qa": [str(number) for number in range(7)], "rag": ["a"]}, 3)
    assert [(b.group, b.part, len(b.prompts)) for b in blocks] == [
        ("qa", 0, 2),
        ("qa", 1, 2),
        ("qa", 2, 3),
        ("rag", 0, 1),
    ]
    assert [text for b in blocks[:3] for text in b.prompts] == [str(n) for n in range(7)]


def test_arrivals_are_immediate_or_at_the_given_rate_and_repeatable() -> None:
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    times = arrival_times(2000, 4.0)
    assert times == sorted(times) == arrival_times(2000, 4.0)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(500.0, rel=0.1)
