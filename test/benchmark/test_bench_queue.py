"""The blocks of `bench_queue`, how it sends them, and the servers that it compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.configuration import Settings
from benchmark.harness.server import ServerError
from benchmark.harness.serving import Sent
from benchmark.queueing.configurations import NAMES, configuration
from benchmark.queueing.load import Block, arrival_times, blocks_of, cells_of, send

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, False, (3,), (5,))
BLOCKS = tuple(Block("qa", part, ("Who?",)) for part in range(3))
AT_ONCE = float("inf")


def test_every_configuration_serves_every_block_in_alternating_order() -> None:
    cells = cells_of(BLOCKS, ["none", "lookup"], 2)
    order = [f"{cell.config} {cell['part']}" for cell in cells]
    assert order[:6] == ["none 0", "lookup 0", "lookup 1", "none 1", "none 2", "lookup 2"]
    # The fourth block is the first one of the second round.
    assert order[6:8] == ["lookup 0", "none 0"]


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


def test_requests_ask_for_their_number_of_completions() -> None:
    few, most = Flaky(), Flaky()
    sent_by(few, "qspec-2")
    sent_by(most, "qspec-8")
    assert few.bodies[0]["sampling_params"]["custom_params"] == {"qspec_completions": 2}
    assert "custom_params" not in most.bodies[0]["sampling_params"]


def test_groups_are_divided_into_a_few_blocks_of_nearly_equal_size() -> None:
    blocks = blocks_of({"qa": [str(number) for number in range(7)], "rag": ["a"]}, 3)
    assert [(b.group, b.part, len(b.prompts)) for b in blocks] == [
        *(("qa", 0, 2), ("qa", 1, 2), ("qa", 2, 3), ("rag", 0, 1)),
    ]
    assert [text for b in blocks[:3] for text in b.prompts] == [str(n) for n in range(7)]


def test_arrivals_are_immediate_or_at_the_given_rate_and_repeatable() -> None:
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    times = arrival_times(2000, 4.0)
    assert times == sorted(times) == arrival_times(2000, 4.0)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(500.0, rel=0.1)


def flags(name: str, settings: Settings = SETTINGS) -> list[str]:
    return configuration(name, settings).server().command


@pytest.mark.parametrize("name", NAMES)
def test_configurations_differ_only_in_speculation_and_cores(name: str) -> None:
    this = configuration(name, SETTINGS)
    command, plain = (configuration(n, SETTINGS).server().command for n in (name, "none"))
    assert all(flag.startswith("--speculative") for flag in this.flags[::2])
    # The port comes last, and is each server's own.
    assert command[:-4] == [*plain[:-4], *this.flags]
    # For a comparison at equal hardware the target has the cores of target and sidecar.
    assert this.cores == ((3, 5) if name.endswith("-equal") else (3,))
    assert this.flags == configuration(name.removesuffix("-equal"), SETTINGS).flags
    given = dict(zip(this.flags[::2], this.flags[1::2], strict=True))
    assert this.has_sidecar == name.startswith("qspec")
    if this.has_sidecar:
        asked = this.custom_params.get("qspec_completions")
        assert name == f"qspec-{asked or given['--speculative-qspec-completions']}"
        assert given["--speculative-qspec-cores"] == "5"
