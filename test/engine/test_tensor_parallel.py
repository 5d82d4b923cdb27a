"""A target of two ranks on two CPUs: rank 0 decides, and both ranks run the same passes.

The server passes as a GPU server does; with `--thorough` all tests also run on one that does not.
The target is a small model with random weights. It has an even number of heads, so two ranks can
divide it. The draft model is the same model. float32 sums of two ranks do not depend on their
order, so answers are compared exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.config import MODES
from test.engine.awaiting import awaiting
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import (
    COMMON,
    PLAIN,
    QSPEC,
    ask_all,
    connected,
    generate,
    ids,
    state,
    tagged,
    turn,
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
"""Without it a model of random weights soon repeats one token. With it the sidecar, which applies
no penalties, drafts hardly any right token."""
FROM_SIDECAR = {"custom_params": {"qspec_sources": ["queue", "step"]}}
ALL_SOURCES: dict[str, Any] = {"custom_params": {}}
FAULT = """
    import os

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


@pytest.fixture(scope="module", params=["gpu", pytest.param("normal", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest,
    small_target: Path,
    faults: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    shape = GPU_SHAPE if request.param == "gpu" else ""
    environment = awaiting(tmp_path_factory.mktemp("plugin"), FAULT + shape)
    environment["QSPEC_TEST_FAULTS"] = str(faults)
    arguments = [*TENSOR_PARALLEL, *QSPEC, "--speculative-draft-model-path", str(small_target)]
    with Server(small_target, arguments, environment=environment) as running:
        connected(running)
        yield running


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    """All prompts, without a penalty and with one."""
    return [
        {"text": text, "sampling_params": own} for text in PROMPTS for own in (FROM_SIDECAR, VARIED)
    ]


@pytest.fixture(scope="module")
def expected(server: Server, bodies: Bodies) -> Answers:
    """Answers without speculation."""
    answers = ask_all(server, bodies, **PLAIN)
    assert max(len(set(answer)) for answer in ids(answers)) > 10
    return answers


@pytest.mark.thorough
def test_answers_without_drafts_are_those_of_two_ranks_without_this_plugins_algorithm(
    small_target: Path, bodies: Bodies, expected: Answers
) -> None:
    with Server(small_target, TENSOR_PARALLEL) as server:
        assert ids(ask_all(server, bodies, **ALL_SOURCES)) == ids(expected)


@pytest.mark.parametrize("server", ["gpu"], indirect=True)
def test_ranks_launch_passes_without_drafts_before_they_know_the_last_tokens(
    server: Server, bodies: Bodies, expected: Answers
) -> None:
    """Drafts come and go meanwhile: a request with drafts joins and leaves the batch."""
    assert ids(ask_all(server, bodies)) == ids(expected)
    before = state(server)["early_passes"]
    # Without the penalties, because a pass with penalties waits for the last tokens.
    assert ids(ask_all(server, bodies[::2], **PLAIN)) == ids(expected[::2])
    assert state(server)["early_passes"] - before > 10
    assert state(server)["eager_passes"] == 0


def accepted(answer: dict[str, Any]) -> int:
    count: int = answer["meta_info"]["qspec"]["accepted_tokens"]
    return count


def test_each_rank_has_cpus_of_its_own(server: Server) -> None:
    ranks = [p for p in server.processes if "scheduler" in "".join(p.cmdline())]
    first, second = (set(process.cpu_affinity()) for process in ranks)
    assert len(first) == len(second) > 0
    assert not first & second


@pytest.mark.parametrize("mode", MODES[:-1])  # in `auto` the contract does
def test_every_pipeline_gives_the_answers_of_two_ranks_without_speculation(
    server: Server, bodies: Bodies, expected: Answers, mode: str
) -> None:
    turn(server, mode=MODES.index(mode))
    answers = ask_all(server, bodies, **ALL_SOURCES)
    turn(server, mode=MODES.index("auto"))
    assert ids(answers) == ids(expected)
    assert sum(map(accepted, answers)) > 0
    assert not state(server)["failed"], server.log[-4000:]


def test_a_guess_in_the_prompt_is_accepted(server: Server, expected: Answers) -> None:
    varied = expected[1]["output_ids"]
    custom = {"qspec_guess_ids": varied, "qspec_sources": ["guess"]}
    answer = generate(server, PROMPTS[0], custom_params=custom, **VARIED)
    assert answer["output_ids"] == varied
    assert accepted(answer) > len(varied) // 3


class TestContract(ServerContract):
    """Rank 0 draws the tokens of sampled answers."""

    refused = (*ServerContract.refused, ("prefill_drafts", 1, "qspec_prefill_drafts is 1"))


def test_a_failure_on_one_rank_ends_speculation_on_all_and_changes_no_answer(
    server: Server, faults: Path, bodies: Bodies, expected: Answers
) -> None:
    """The last test of this server."""
    assert not state(server)["failed"]
    (faults / "rank1").touch()
    assert ids(ask_all(server, bodies, **ALL_SOURCES)) == ids(expected)
    assert state(server)["failed"]
    assert server.log.count("Speculation failed while preparing a pass with drafts") == 1
    assert server.log.count("Speculation failed on rank 1 of the target") == 1
    (faults / "rank1").unlink()
    again = generate(server, tagged(PROMPTS[4], "Oslo"))
    assert "qspec" not in again["meta_info"]
    assert ids(ask_all(server, bodies, **ALL_SOURCES)) == ids(expected)
