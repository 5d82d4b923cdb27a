"""A server with an EAGLE head: its drafts are those that the head makes of the target's states.

The target is a small random model in float32, so transformers tells its answers and its states. The
heads are trained for it in some seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NamedTuple

import pytest
import torch

from benchmark.harness.speculation import wait_for_sidecar
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.config import HeadKind, read
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.link import PrivateEndpoint
from sglang_qspec.sidecar.hydra_model import ReadyHydra
from sglang_qspec.tools.train_head.command import Training, train_head
from sglang_qspec.tools.train_head.prompts import PROMPTS
from sglang_qspec.tools.train_head.target import TargetModel
from test.engine.awaiting import awaiting
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import QSPEC, connected, cores, sidecar_process, state, until
from test.heads.tiny import SHAPE, Drafting, write_target
from test.preloaded.interpreter import Popen
from test.preloaded.server import Server

served = pytest.mark.server
CHUNK = 16
"""Prompt tokens of a prefill, so that each prompt takes several ones."""
TOKENS = 32
ROOT = Path(__file__).parents[2]
STEPS = {"qspec_sources": ["head"], "qspec_return_trace": True}


class Models(NamedTuple):
    """Folders of a target and of a head for it."""

    target: Path
    head: Path


def train(folder: Path, kind: str, **more: Any) -> Models:
    """Train a head of this kind."""
    torch.set_num_threads(1)  # more would wait for each other beside another server
    target = write_target(folder / "target")
    training = Training(
        kind, answers=1, tokens=48, epochs=16, batch_tokens=1024, dtype="float32", **more
    )
    return Models(target, train_head(target, folder / "head", PROMPTS[:48], training))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An EAGLE-3 head, which most tests serve."""
    return train(tmp_path_factory.mktemp("models"), "eagle3", draft_vocab=200)


@contextlib.contextmanager
def serving(target: Path, plugin: Path, *more: str, shape: str = "") -> Iterator[Server]:
    """A server with a sidecar; `plugin` is an empty folder."""
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle", *QSPEC),
        *("--max-total-tokens", "4096", "--context-length", "512", "--log-level", "warning"),
        *("--speculative-qspec-cores", str(cores(1)[0]), *more),
    ]
    environment = awaiting(plugin, shape)
    with Server(target, arguments, cores=cores(0), environment=environment) as running:
        wait_for_sidecar(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]


@pytest.fixture(scope="module", params=["eagle3", "eagle2", "medusa", "hydra"])
def served_folders(
    request: pytest.FixtureRequest, folders: Models, tmp_path_factory: pytest.TempPathFactory
) -> Models:
    if request.param == "eagle3":
        return folders
    more = {"draft_vocab": 200} if request.param == "hydra" else {}
    return train(tmp_path_factory.mktemp("models"), request.param, **more)


@pytest.fixture(scope="module", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest,
    served_folders: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    shape = GPU_SHAPE if request.param == "gpu" else ""
    target, head = served_folders
    more = [
        *("--max-running-requests", "4", "--chunked-prefill-size", str(CHUNK)),
        *("--speculative-draft-model-path", str(head), "--enable-return-hidden-states"),
        *("--speculative-qspec-step-tokens", "1"),  # no draft outlives a pass
    ]
    with serving(target, tmp_path_factory.mktemp("plugin"), *more, shape=shape) as running:
        yield running


def ask(
    server: Server, ids: list[list[int]], custom: Mapping[str, Any] = STEPS, **sampling: Any
) -> list[dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
    body = {"input_ids": ids, "sampling_params": {**params, "custom_params": dict(custom)}}
    found: list[dict[str, Any]] = server.post("/generate", body)
    return found


class Reference:
    """What transformers computes: the target's answers, and the head's drafts."""

    def __init__(self, folders: Models) -> None:
        self._target = TargetModel(folders.target, "float32")
        cpu = torch.device("cpu")
        self._head: Any
        if read(folders.head).kind is HeadKind.HYDRA:
            self._head = ReadyHydra(folders.head, folders.target, cpu)
        elif read(folders.head).kind is HeadKind.MEDUSA:
            self._head = checkpoint.load_medusa(folders.head, torch.float32, cpu)
        else:
            self._head = checkpoint.load(folders.head, torch.float32, cpu)
        if isinstance(self._head, Eagle2Head):
            self._head.lm_head = self._target.lm_head

    def prompts(self, begin: int) -> list[list[int]]:
        """Four prompts that the head was trained with, so that it drafts much right."""
        return self._target.encode(PROMPTS[begin : begin + 4])

    def answer(self, prompt: list[int]) -> list[int]:
        """The greedy answer of TOKENS tokens."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(TOKENS):
                logits = self._target.states(ids, (0,)).last[:, -1] @ self._target.lm_head.T
                ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        return ids[0, len(prompt) :].tolist()

    def drafted(self, text: list[int], begin: int) -> int:
        """The head's token behind a text, if it has the states from `begin` on."""
        layers = self._head.config.layers or ()
        with torch.inference_mode():
            states = self._target.states(torch.tensor([text]), layers).read[0].clone()
            if isinstance(self._head, MedusaHeads):
                newest = states[-2].bfloat16().float()
                return int(self._head.logits(self._head.output(newest, 0), 0).argmax())
            if isinstance(self._head, ReadyHydra):
                newest = states[-2:-1].bfloat16().float()
                logits, _ = self._head.read(torch.tensor(text[-1:]), newest)
                return int(self._head.target_ids[logits[0].argmax()])
            drafting = Drafting(self._head, self._target.embedding)
            projected = self._head.project(states).bfloat16().float()
            for place in range(begin, len(text) - 1):
                output = drafting.row(text[place + 1], projected[place])
            return int(self._head.target_ids[self._head.logits(output).argmax()])


@pytest.fixture(scope="module")
def reference(served_folders: Models) -> Reference:
    return Reference(served_folders)


def check_drafts(reference: Reference, prompt: list[int], answer: dict[str, Any]) -> int:
    """Check that the drafts of an answer are the head's; returns the number of accepted tokens."""
    cached = answer["meta_info"]["cached_tokens"]
    for each in answer["meta_info"]["qspec_trace"]["passes"]:
        tree = each["tree"]
        if not tree["ids"]:
            continue
        assert set(tree["sources"]) == {"head"}
        text = [*prompt, *answer["output_ids"][: each["start"]]]
        first = [
            token
            for token, parent in zip(tree["ids"], tree["parents"], strict=True)
            if parent == -1
        ]
        assert reference.drafted(text, cached) in first
    accepted: int = answer["meta_info"]["qspec"]["accepted_by_source"]["head"]
    return accepted


@served
def test_answers_are_the_targets_and_drafts_the_heads(server: Server, reference: Reference) -> None:
    server.post("/flush_cache?timeout=60", {})
    given, accepted = reference.prompts(1), 0
    for prompt, answer in zip(given, ask(server, given), strict=True):
        assert answer["output_ids"] == reference.answer(prompt)
        accepted += check_drafts(reference, prompt, answer)
    assert accepted >= 8


@served
def test_a_cached_prompt_has_drafts_from_its_last_tokens(
    server: Server, reference: Reference
) -> None:
    given = reference.prompts(5)
    ask(server, given)
    longer = [[*prompt, *prompt[:4]] for prompt in given]
    for prompt, answer in zip(longer, ask(server, longer), strict=True):
        assert 0 < answer["meta_info"]["cached_tokens"] < len(prompt)
        assert answer["output_ids"] == reference.answer(prompt)
        check_drafts(reference, prompt, answer)
        assert answer["meta_info"]["qspec"]["proposed_tokens"] > 0


@served
def test_sampled_answers_do_not_depend_on_the_head(server: Server, reference: Reference) -> None:
    given: Any = reference.prompts(9)
    sampling: Any = {"temperature": 0.8, "sampling_seed": 11}
    plain = ask(server, given, {"qspec_enabled": False}, **sampling)
    drafted = ask(server, given, STEPS, **sampling)
    assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in plain]
    assert sum(a["meta_info"]["qspec"]["proposed_tokens"] for a in drafted) > 0


@served
def test_hidden_states_are_those_that_a_client_gets_without_a_head(
    server: Server, reference: Reference
) -> None:
    (prompt, *_) = reference.prompts(13)
    params = {"temperature": 0, "max_new_tokens": 4, "custom_params": STEPS}
    body = {"input_ids": prompt, "sampling_params": params, "return_hidden_states": True}
    states = server.post("/generate", body)["meta_info"]["hidden_states"]
    assert torch.tensor(states[-1]).shape[-1] == SHAPE["hidden_size"]


@served
def test_a_killed_sidecar_drafts_again_for_later_requests(
    server: Server, reference: Reference
) -> None:
    before = state(server)["sidecar_restarts"]
    sidecar_process(server).kill()
    (prompt, *_) = reference.prompts(17)
    (answer,) = ask(server, [prompt])
    assert answer["output_ids"] == reference.answer(prompt)
    until(lambda: state(server)["sidecar_restarts"] > before)
    until(lambda: state(server)["sidecar"] == "ready")
    (prompt, *_) = reference.prompts(21)
    (answer,) = ask(server, [prompt])
    assert check_drafts(reference, prompt, answer) >= 2


@pytest.fixture(scope="module")
def beside(folders: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the head beside a draft model, which is the target and has a head, too."""
    own = train(tmp_path_factory.mktemp("models"), "hydra", draft_vocab=200).head
    more = [
        *("--max-running-requests", "2", "--speculative-draft-model-path", str(folders.target)),
        *("--speculative-qspec-head-path", str(folders.head)),
        *("--speculative-qspec-draft-model-head", str(own)),
    ]
    with serving(folders.target, tmp_path_factory.mktemp("plugin"), *more) as running:
        yield running


@served
def test_a_draft_model_drafts_for_waiting_requests_and_the_head_for_running_ones(
    beside: Server, folders: Models
) -> None:
    reference = Reference(folders)
    given = [*reference.prompts(1), *reference.prompts(5)]
    by_source: Counter[str] = Counter()
    for custom in ({}, {"qspec_sources": ["head"]}, {"qspec_sources": ["queue"]}):
        for prompt, answer in zip(given, ask(beside, given, custom), strict=True):
            assert answer["output_ids"] == reference.answer(prompt)
            record = answer["meta_info"]["qspec"]
            by_source.update(record["accepted_by_source"])
    assert by_source["queue"] > 0
    assert by_source["head"] > 0
    assert by_source["step"] == 0


@served
def test_the_draft_models_own_head_is_often_right(beside: Server, folders: Models) -> None:
    reference = Reference(folders)
    given = [*reference.prompts(1), *reference.prompts(5), *reference.prompts(9)]
    for prompt, answer in zip(given, ask(beside, given, {}), strict=True):
        assert answer["output_ids"] == reference.answer(prompt)
    (sidecar,) = state(beside)["sidecars"]
    assert sidecar["guessed_tokens"] > 0
    assert sidecar["right_guesses"] > sidecar["guessed_tokens"] / 8  # of 260 ids


@pytest.fixture(scope="module")
def apart(folders: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose head runs in a sidecar that the test has started."""
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    given = ["--model-path", str(folders.head), "--target-path", str(folders.target)]
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle", *QSPEC),
        *("--max-total-tokens", "4096", "--context-length", "512", "--log-level", "warning"),
        *("--max-running-requests", "2", "--speculative-qspec-head-path", str(folders.head)),
    ]
    with PrivateEndpoint() as private, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "sglang_qspec.sidecar", *given, "--device", "cpu"]
        command += ["--endpoint", private.address, "--cores", str(cores(1)[0])]
        sidecar = Popen(command, cwd=ROOT, stdin=DEVNULL, env=os.environ | environment)
        stack.callback(sidecar.wait)
        stack.callback(sidecar.kill)
        arguments += ["--speculative-qspec-endpoint", private.address]
        with Server(folders.target, arguments, cores=cores(0), environment=environment) as running:
            connected(running)
            yield running
            assert not state(running)["failed"], running.log[-4000:]


@served
def test_a_sidecar_at_an_endpoint_runs_the_head(apart: Server, folders: Models) -> None:
    reference = Reference(folders)
    given, accepted = reference.prompts(1), 0
    for prompt, answer in zip(given, ask(apart, given), strict=True):
        assert answer["output_ids"] == reference.answer(prompt)
        accepted += answer["meta_info"]["qspec"]["accepted_by_source"]["head"]
    assert accepted >= 8
