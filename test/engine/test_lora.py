"""LoRA adapters on a running server: real target, real sidecar, float32.

The pool has room for two adapters besides the base model, so SGLang evicts adapters while the tests
use three.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import ServerError
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.prompts import PROMPTS
from sglang_qspec.config import MODES
from sglang_qspec.tools.models import DemoModels
from test.engine.adapters import LINEAR, write_adapter
from test.engine.awaiting import awaiting, held
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.features.asking import PLAIN, ask, guessing
from test.engine.server.running import QSPEC, cores, of_sidecar, state, turn, until
from test.preloaded.server import Server
from test.random_llama import write_random_llama

pytestmark = pytest.mark.server

ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--log-level", "warning"),
    *("--max-running-requests", "4", "--max-total-tokens", "8192", "--context-length", "1024"),
    *("--lora-target-modules", *LINEAR, "lm_head", "embed_tokens"),
    *("--max-lora-rank", "8", "--max-loras-per-batch", "3", "--sleep-on-idle"),
]
SCALE = 0.1
"""Effect of the random adapters: answers differ, but many tokens are those of the base model."""
TOKENS = {"max_new_tokens": 32, "ignore_eos": True}
NAMES = (None, "linear", "head")
"""Adapters of the requests of a mixed batch; None is the target alone."""


@pytest.fixture(scope="module")
def adapters(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, base = tmp_path_factory.mktemp("adapters"), models.target
    parts: dict[str, tuple[Sequence[str], int]] = {
        "linear": (LINEAR, 8),
        "head": (("q_proj", "v_proj", "lm_head"), 4),
        "late": (("down_proj", "embed_tokens"), 8),
        "later": (("o_proj",), 2),
    }
    return {
        name: write_adapter(folder / name, base, targets, rank=rank, scale=SCALE, seed=seed)
        for seed, (name, (targets, rank)) in enumerate(parts.items())
    }


@pytest.fixture(scope="module")
def server(
    models: DemoModels, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    paths = [f"{name}={adapters[name]}" for name in NAMES if name]
    arguments = [
        *ARGUMENTS,
        *("--lora-paths", *paths),
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        wait_for_sidecar(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]


@pytest.fixture(scope="module")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS[:4])


@pytest.fixture(scope="module")
def expected(server: Server, prompts: list[str]) -> dict[tuple[str, str | None], dict[str, Any]]:
    """The answer to each prompt with each adapter, without drafts."""
    return all_at_once(server, prompts, custom_params=PLAIN)


def all_at_once(
    server: Server, prompts: list[str], names: Sequence[str | None] = NAMES, **sampling: Any
) -> dict[tuple[str, str | None], dict[str, Any]]:
    """The answers to all prompts with all adapters."""
    asked = [(prompt, name) for prompt in prompts for name in names]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(
            lambda one: ask(server, {**TOKENS, **sampling}, text=one[0], lora_path=one[1]), asked
        )
        return dict(zip(asked, answers, strict=True))


def ids(answers: dict[Any, dict[str, Any]]) -> dict[Any, list[int]]:
    return {key: answer["output_ids"] for key, answer in answers.items()}


def test_the_adapters_change_the_answers(
    prompts: list[str], expected: dict[tuple[str, str | None], dict[str, Any]]
) -> None:
    """Without this the other tests would compare answers that cannot differ."""
    for one, other in ((None, "linear"), (None, "head"), ("linear", "head")):
        differ = [
            expected[text, one]["output_ids"] != expected[text, other]["output_ids"]
            for text in prompts
        ]
        assert sum(differ) > len(prompts) // 2


def test_requests_of_two_adapters_and_of_none_in_one_batch_keep_their_answers_in_halves(
    server: Server, prompts: list[str], expected: dict[tuple[str, str | None], dict[str, Any]]
) -> None:
    turn(server, mode=MODES.index("halves"))
    answers = all_at_once(server, prompts)
    turn(server, mode=MODES.index("auto"))
    assert ids(answers) == ids(expected)
    for name in NAMES:
        accepted = [
            of_sidecar(answer["meta_info"]["qspec"]["accepted_by_source"])
            for (_, own), answer in answers.items()
            if own == name
        ]
        assert sum(accepted) > 0, f"no draft of the draft model was accepted with {name}"


@pytest.mark.parametrize("name", ["linear", "head"])
def test_an_adapters_own_answer_is_accepted_as_a_guess(
    server: Server,
    prompts: list[str],
    expected: dict[tuple[str, str | None], dict[str, Any]],
    name: str,
) -> None:
    right = expected[prompts[0], name]["output_ids"]
    custom = {**guessing(right), "qspec_sources": ["guess"]}
    answer = ask(server, {**TOKENS, "custom_params": custom}, text=prompts[0], lora_path=name)
    assert answer["output_ids"] == right
    assert answer["meta_info"]["qspec"]["accepted_tokens"] > len(right) // 2


def test_equal_prompts_and_seeds_have_different_answers_with_different_adapters(
    server: Server, prompts: list[str]
) -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "sampling_seed": 7}
    plain = all_at_once(server, prompts[:1], custom_params=PLAIN, **seeded)
    assert len({tuple(answer) for answer in ids(plain).values()}) == len(NAMES)


def test_the_openai_endpoints_name_an_adapter_in_the_model_or_in_lora_path(
    server: Server,
    models: DemoModels,
    prompts: list[str],
    expected: dict[tuple[str, str | None], dict[str, Any]],
) -> None:
    body = {"prompt": prompts[1], "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    for named in ({"model": f"{models.target}:linear"}, {"model": "x", "lora_path": "linear"}):
        answer = server.post("/v1/completions", {**body, **named})
        assert answer["choices"][0]["text"] == expected[prompts[1], "linear"]["text"]
    chat = {
        "messages": [{"role": "user", "content": PROMPTS[1]}],
        "max_tokens": 32,
        "temperature": 0,
    }
    answers = [
        server.post("/v1/chat/completions", {**chat, "model": f"x:{name}", "custom_params": custom})
        for name in ("linear", "head")
        for custom in (PLAIN, {})
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    with pytest.raises(ServerError, match="HTTP 400"):
        server.post("/v1/completions", {**body, "model": "x:unknown"})


def test_adapters_are_loaded_and_unloaded_while_others_run(
    server: Server,
    adapters: dict[str, Path],
    prompts: list[str],
    expected: dict[tuple[str, str | None], dict[str, Any]],
) -> None:
    """An adapter that takes the name of an unloaded one gets none of its KV and drafts."""

    def answer_of(folder: str) -> list[int]:
        loaded = {"lora_name": "late", "lora_path": str(adapters[folder])}
        assert server.post("/load_lora_adapter", loaded)["success"]
        plain = ids(all_at_once(server, prompts[:1], ["late"], custom_params=PLAIN))
        assert ids(all_at_once(server, prompts[:1], ["late"])) == plain
        assert server.post("/unload_lora_adapter", {"lora_name": "late"})["success"]
        return plain[prompts[0], "late"]

    with ThreadPoolExecutor(1) as pool:
        with held(server):
            others = pool.submit(all_at_once, server, prompts[1:])
            until(lambda: state(server)["live_requests"] > 2)
        late, later = answer_of("late"), answer_of("later")
        rest = others.result()
    assert late != later
    assert expected[prompts[0], None]["output_ids"] not in (late, later)
    for key, answer in rest.items():
        assert answer["output_ids"] == expected[key]["output_ids"]
    # SGLang loads an unloaded adapter again if a request names it.
    again = all_at_once(server, prompts[:1], ["late"])
    assert again[prompts[0], "late"]["output_ids"] == later
    with pytest.raises(ServerError, match="HTTP 400"):
        ask(server, TOKENS, text=prompts[0], lora_path="unknown")


def test_new_weights_of_the_target_reach_the_layers_below_the_adapters(
    server: Server,
    models: DemoModels,
    prompts: list[str],
    expected: dict[tuple[str, str | None], dict[str, Any]],
) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(models.target)})["success"]
    for key, answer in all_at_once(server, prompts[:2]).items():
        assert answer["output_ids"] == expected[key]["output_ids"]


class TestContract(ServerContract):
    refused = (*ServerContract.refused, ("prefill_drafts", 1, "qspec_prefill_drafts is 1"))

    @pytest.fixture
    def bodies(self, prompts: list[str]) -> Bodies:
        """All prompts with each adapter and with none."""
        return [
            {"text": text, "lora_path": name, "sampling_params": TOKENS}
            for text in prompts
            for name in NAMES
        ]

    @pytest.fixture
    def expected(self, expected: dict[tuple[str, str | None], dict[str, Any]]) -> Answers:
        return [*expected.values()]


@pytest.mark.thorough
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_two_ranks_give_the_answers_of_one_rank_without_qspec(
    models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    model = write_random_llama(
        folder / "model",
        models,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    paths = [
        f"{name}={write_adapter(folder / name, model, targets, rank=4, scale=1.0, seed=seed)}"
        for seed, (name, targets) in enumerate(
            {"linear": LINEAR, "head": ("o_proj", "lm_head")}.items()
        )
    ]
    prompts = ["one two three one two three one two", "The sea was calm, and the boats went out."]
    arguments = [*ARGUMENTS, "--lora-paths", *paths]
    qspec = [*QSPEC, "--speculative-draft-model-path", str(model)]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(model, [*arguments, *qspec, "--tp-size", "2"], environment=environment) as server:
        wait_for_sidecar(server)
        plain = ids(all_at_once(server, prompts, custom_params=PLAIN))
        assert ids(all_at_once(server, prompts)) == plain
        assert of_sidecar(state(server)["accepted_tokens"]) > 0
        assert not state(server)["failed"], server.log[-4000:]
    assert len({tuple(answer) for answer in plain.values()}) > len(NAMES)
    with Server(model, arguments) as stock:
        assert ids(all_at_once(stock, prompts)) == plain
