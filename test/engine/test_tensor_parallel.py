"""A target of two ranks on two CPUs: rank 0 decides, and both ranks run the same passes.

The target is a small model with random weights. It has an even number of heads, so two ranks can
divide it. The draft model is the same model. float32 sums of two ranks do not depend on their
order, so answers are compared exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.server import ServerError
from benchmark.harness.speculation import wait_for_sidecar
from sglang_qspec.config import MODES
from test.engine.awaiting import AWAIT
from test.engine.faulty import plugin
from test.engine.server.running import (
    COMMON,
    QSPEC,
    generate,
    sidecar_process,
    state,
    tagged,
    turn,
    until,
)
from test.preloaded.server import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]

TENSOR_PARALLEL = [*COMMON, "--tp-size", "2"]
PROMPTS = [
    "The sea was calm, and the boats went out. The sea was calm, and the boats",
    "one two three one two three one two three one two",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "List the months of the year: January, February, March",
    "What is the capital of Norway?",
    "a b c d a b c d a b c d a",
]
VARIED = {"frequency_penalty": 1.5}
"""Without it a model of random weights soon repeats one token."""
FAULT = """
import os

def load():
    from sglang.srt.runtime_context import get_parallel
    from sglang_qspec.engine.passes import worker

    sound = worker.verify_input_of

    def verify_input_of(*arguments, **given):
        rank = get_parallel().tp_group.rank_in_group
        if os.path.exists(os.environ["QSPEC_TEST_FAULTS"] + f"/rank{rank}"):
            raise KeyError("a fault")
        return sound(*arguments, **given)

    worker.verify_input_of = verify_input_of
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file `rankN` in this folder makes rank N fail to prepare each pass with drafts."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(
    small_target: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    environment = plugin(tmp_path_factory.mktemp("plugin"), FAULT + AWAIT)
    arguments = [
        *TENSOR_PARALLEL,
        *(*QSPEC, "--speculative-draft-model-path", str(small_target)),
    ]
    environment["QSPEC_TEST_FAULTS"] = str(faults)
    with Server(small_target, arguments, environment=environment) as running:
        wait_for_sidecar(running)
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """Answers without speculation."""
    found = ids(ask(server, custom_params={"qspec_enabled": False}))
    assert max(len(set(answer)) for answer in found) > 10
    return found


@pytest.mark.thorough
def test_answers_without_drafts_are_those_of_two_ranks_without_this_plugins_algorithm(
    small_target: Path, expected: list[list[int]]
) -> None:
    with Server(small_target, TENSOR_PARALLEL) as server:
        assert ids(ask(server)) == expected


def ask(server: Server, **sampling: Any) -> list[dict[str, Any]]:
    """The answers to all prompts at once, without a penalty and with one."""
    asked = [(text, own) for text in PROMPTS for own in ({}, VARIED)]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: generate(server, one[0], **one[1], **sampling), asked))


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def accepted(answer: dict[str, Any]) -> int:
    count: int = answer["meta_info"]["qspec"]["accepted_tokens"]
    return count


def test_each_rank_has_cpus_of_its_own(server: Server) -> None:
    ranks = [p for p in server.processes if "scheduler" in "".join(p.cmdline())]
    first, second = (set(process.cpu_affinity()) for process in ranks)
    assert len(first) == len(second) > 0
    assert not first & second


@pytest.mark.parametrize("mode", MODES)
def test_every_pipeline_gives_the_answers_of_two_ranks_without_speculation(
    server: Server, expected: list[list[int]], mode: str
) -> None:
    turn(server, mode=MODES.index(mode))
    answers = ask(server)
    turn(server, mode=MODES.index("auto"))
    assert ids(answers) == expected
    assert sum(map(accepted, answers)) > 0
    assert not state(server)["failed"], server.log[-4000:]


def test_a_guess_in_the_prompt_is_accepted(server: Server, expected: list[list[int]]) -> None:
    custom = {"qspec_guess_ids": expected[1], "qspec_sources": ["guess"]}
    answer = generate(server, PROMPTS[0], custom_params=custom, **VARIED)
    assert answer["output_ids"] == expected[1]
    assert accepted(answer) > len(expected[1]) // 3


def test_sampled_answers_come_from_rank_0(server: Server) -> None:
    """A seed gives the same text with drafts and without; without one the ranks draw alike."""
    seeded = {"temperature": 1.0, "sampling_seed": 7}
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(
            lambda enabled: generate(
                server, PROMPTS[2], custom_params={"qspec_enabled": enabled}, **seeded
            )["output_ids"],
            (True, False),
        )
        assert len(set(map(tuple, texts))) == 1
        free = list(pool.map(lambda _: generate(server, PROMPTS[3], temperature=1.0), range(4)))
    assert len({tuple(answer["output_ids"]) for answer in free}) > 1
    assert not state(server)["failed"], server.log[-4000:]


def test_a_setting_that_needs_a_single_rank_is_refused(server: Server) -> None:
    with pytest.raises(ServerError, match="qspec_prefill_drafts is 1"):
        turn(server, prefill_drafts=1)


def test_a_killed_sidecar_changes_no_answer(server: Server, expected: list[list[int]]) -> None:
    restarts = state(server)["sidecar_restarts"]
    sidecar_process(server).kill()
    assert ids(ask(server)) == expected
    until(lambda: state(server)["sidecar_restarts"] > restarts)
    wait_for_sidecar(server)


def test_a_failure_on_one_rank_ends_speculation_on_all_and_changes_no_answer(
    server: Server, faults: Path, expected: list[list[int]]
) -> None:
    """The last test of this server."""
    assert not state(server)["failed"]
    (faults / "rank1").touch()
    assert ids(ask(server)) == expected
    assert state(server)["failed"]
    assert server.log.count("Speculation failed while preparing a pass with drafts") == 1
    assert server.log.count("Speculation failed on rank 1 of the target") == 1
    (faults / "rank1").unlink()
    again = generate(server, tagged(PROMPTS[4], "Oslo"))
    assert "qspec" not in again["meta_info"]
    assert ids(ask(server)) == expected
