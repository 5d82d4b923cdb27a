"""Answers that must follow a grammar: drafts that the grammar forbids change no answer."""

import json
import re
from typing import Any

import pytest
from sglang.srt.arg_groups.choices import GRAMMAR_BACKEND_CHOICES

from benchmark.harness.server import ServerError
from sglang_qspec.tools.models import DemoModels
from test.engine.features.asking import PLAIN, ask, both, check_same, guessing
from test.engine.server.running import COMMON, QSPEC, state
from test.preloaded.server import Server

pytestmark = pytest.mark.server

TEXT = "Introduce the capital of France. Answer in JSON: "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[\\w]+$"},
        "population": {"type": "integer", "maximum": 9999999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
STRUCTURE = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
GRAMMARS = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "object": {"json_schema": '{"type": "object"}'},
    "regex": {"regex": r"(\d{3}-){3}[a-f]{4}"},
    "fixed": {"regex": r"user@example\.com"},
    "ebnf": {"ebnf": 'root ::= "(" [0-9]+ ")" | "Hello" " world"*'},
    "tag": {"structural_tag": json.dumps(STRUCTURE)},
}


@pytest.fixture(scope="module")
def free(server: Server) -> list[int]:
    """Output ids without a grammar; the grammars of the tests forbid most of them."""
    ids: list[int] = ask(server, {"max_new_tokens": 24}, text=TEXT)["output_ids"]
    return ids


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("end", [{}, {"stop": ["pop", "12"]}], ids=str)
def test_a_grammar_gives_the_same_answer_as_without_drafts(
    server: Server, grammar: str, end: dict[str, Any]
) -> None:
    sampling = {"max_new_tokens": 24, **GRAMMARS[grammar], **end}
    plain, ours = both(server, sampling, text=TEXT)
    check_same(plain, ours, accepted=len(plain["output_ids"]) > 3)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_forbidden_draft_changes_no_answer(server: Server, free: list[int], grammar: str) -> None:
    """Drafts that break the grammar at once, after some tokens, and after its end."""
    sampling = {"max_new_tokens": 24, **GRAMMARS[grammar]}
    plain = ask(server, {**sampling, "custom_params": PLAIN}, text=TEXT)
    allowed = plain["output_ids"]
    guesses = [free, [*allowed[:4], *free], [*allowed, *free, 2, 0], [*allowed[:-1], 2, 2, 0]]
    custom = {"qspec_guess_ids": [guess for guess in guesses if guess]}
    ours = ask(server, {**sampling, "custom_params": custom}, text=TEXT)
    check_same(plain, ours, accepted=len(allowed) > 3)


def test_log_probabilities_under_a_grammar_are_those_of_accepted_tokens(server: Server) -> None:
    sampling = {"max_new_tokens": 48, **GRAMMARS["schema"]}
    plain, ours = both(server, sampling, text=TEXT, return_logprob=True, top_logprobs_num=2)
    check_same(plain, ours)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert len(ours["meta_info"][name]) == len(ours["output_ids"])
    mine, theirs = (answer["meta_info"]["output_token_logprobs"] for answer in (ours, plain))
    assert [x[0] for x in mine] == pytest.approx([x[0] for x in theirs], abs=1e-3)


@pytest.mark.parametrize("mode", [2, 4], ids=["halves", "auto"])
def test_each_request_in_a_batch_of_all_kinds_gets_its_own_answer(
    server: Server, story: dict[str, Any], free: list[int], mode: int
) -> None:
    """Grammars, stops, penalties, biases and log probabilities side by side, four at a time."""
    kinds: list[dict[str, Any]] = [
        {},
        GRAMMARS["schema"],
        GRAMMARS["regex"],
        {"stop": "the"},
        {"frequency_penalty": 0.5},
        {**GRAMMARS["schema"], "frequency_penalty": 0.5},
        {"logit_bias": {"100": 5.0, "200": -100.0}},
        {"max_new_tokens": 3},
    ]
    asked = {
        "text": [TEXT] * len(kinds),
        "return_logprob": [number % 2 == 0 for number in range(len(kinds))],
    }
    server.post("/set_internal_state", {"server_args": {"qspec_mode": mode}})
    answers = []
    for custom in (PLAIN, guessing(free)):
        sampling = [
            {"temperature": 0, "max_new_tokens": 20, **kind, "custom_params": custom}
            for kind in kinds
        ]
        answers.append(server.post("/generate", {**asked, "sampling_params": sampling}))
    server.post("/set_internal_state", {"server_args": {"qspec_mode": 4}})
    for plain, ours in zip(*answers, strict=True):
        check_same(plain, ours, accepted=False)


def test_sampled_answers_under_one_grammar_differ(server: Server) -> None:
    sampling = {"n": 4, "max_new_tokens": 24, "temperature": 0.8, **GRAMMARS["regex"]}
    texts = {answer["text"] for answer in ask(server, sampling, text=TEXT)}
    assert len(texts) > 1
    assert all(len(text) == 16 and text.count("-") == 3 for text in texts)


def test_an_invalid_grammar_is_refused_and_harms_nothing(server: Server) -> None:
    with pytest.raises(ServerError, match="HTTP 400"):
        ask(server, {"max_new_tokens": 8, "json_schema": "INVALID"}, text=TEXT)
    plain, ours = both(server, {"max_new_tokens": 24, **GRAMMARS["regex"]}, text=TEXT)
    check_same(plain, ours)


SIMPLE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
OFFERED = {**GRAMMARS, "simple": {"json_schema": json.dumps(SIMPLE)}}
REFUSED = {
    "outlines": {"schema", "ebnf", "tag"},  # its schemas have no limits of numbers
    "llguidance": {"tag"},  # its tags begin with special tokens
    "none": set(OFFERED),
}
"""The grammars that a backend does not take, also without QSPEC."""
LIST = r"(\d{1,3}, ){5}\d{1,2}"
LIST_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 32]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", GRAMMAR_BACKEND_CHOICES)
def test_each_grammar_backend_gives_the_same_answers_as_without_drafts(
    models: DemoModels, backend: str
) -> None:
    arguments = [*COMMON, *QSPEC, "--grammar-backend", backend, "--reasoning-parser", "qwen3"]
    with Server(models.target, arguments) as server:
        free = ask(server, {"max_new_tokens": 24}, text=TEXT)["output_ids"]
        for name, grammar in OFFERED.items():
            sampling = {"max_new_tokens": 24, **grammar}
            if name in REFUSED.get(backend, ()):
                with pytest.raises(ServerError, match="HTTP 400"):
                    ask(server, sampling, text=TEXT)
                continue
            plain, ours = both(server, sampling, text=TEXT)
            check_same(plain, ours, accepted=len(plain["output_ids"]) > 3)
            check_same(*both(server, sampling, free, text=TEXT), accepted=False)
        if backend != "none":
            check_lists(server)
        assert not state(server)["failed"]


def check_lists(server: Server) -> None:
    """Right and wrong drafts, some of them of tokens that 32 divides, greedy and sampled."""
    for regex, ids in ((LIST, LIST_IDS), ("[01]{12}", [32, 33, 32, 33, 32, 32, 33, 32])):
        sampling = {"max_new_tokens": 30, "regex": regex}
        plain, ours = both(server, sampling, ids, text="The list: ")
        check_same(plain, ours, accepted=False)
        assert re.fullmatch(regex, ours["text"])
        custom = {"qspec_guess_ids": [ids]}
        for temperature in (0.7, 1.5):
            sampled = {**sampling, "temperature": temperature, "custom_params": custom}
            assert re.fullmatch(regex, ask(server, sampled, text="The list: ")["text"])
