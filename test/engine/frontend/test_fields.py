"""Fields of a request that SGLang's scheduler could not serve are refused, and others are kept."""

import math
import typing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from pydantic import BaseModel
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    ScoringRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_qspec.engine.frontend import fields, guesses, prompts
from sglang_qspec.errors import RequestError

VOCAB, HIDDEN = 100, 4
MANAGER = SimpleNamespace(
    server_args=SimpleNamespace(speculative_algorithm="QSPEC"),
    model_config=SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN, dtype=torch.bfloat16),
    sampling_params_class=SamplingParams,
    context_len=1 << 20,
    tokenizer=SimpleNamespace(encode=lambda text, **_: list(text)),
)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        guesses, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=8)
    )


def resolved(**fields_of_request: Any) -> Any:
    obj = GenerateReqInput(**{"text": "Hi", **fields_of_request})
    if "input_ids" in fields_of_request:
        obj.text = None
    guesses.resolve_request(MANAGER, obj)
    return obj


ALLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "top_k": -1, "max_new_tokens": None}, {"temperature": 0.0}),
    ({"max_new_tokens": 8.0, "top_k": 5.0}, {"max_new_tokens": 8, "top_k": 5}),
    ({"ignore_eos": 1, "no_stop_trim": 0}, {"ignore_eos": True, "no_stop_trim": False}),
    ({"logit_bias": {5: 1, "7": -math.inf}}, {"logit_bias": {"5": 1.0, "7": -math.inf}}),
    ({"stop_token_ids": [5, None, "6", VOCAB, -1, 1 << 70]}, {"stop_token_ids": [5, 6]}),
    ({"stop": ("a", "b"), "stop_regex": "a+"}, {"stop": ["a", "b"]}),
    ({"temperature": None, "stop_token_ids": None, "n": 3}, {"temperature": None}),
    ({"custom_params": {"own": [[1, [2]]], 5: 6}}, {"custom_params": {"own": [[1, [2]]], 5: 6}}),
    ({"sampling_seed": -(1 << 63), "min_p": 1}, {"sampling_seed": -(1 << 63)}),
    ({"regex": "null", "ebnf_full_assistant": False}, {"regex": "null"}),
]


@pytest.mark.parametrize(("given", "kept"), ALLOWED, ids=str)
def test_values_that_sglang_serves_are_kept(given: dict[str, Any], kept: dict[str, Any]) -> None:
    before = dict(given)
    params = resolved(sampling_params=given).sampling_params
    assert {name: params[name] for name in kept} == kept
    assert resolved(text=["a", "b"], sampling_params=[given, {}]).sampling_params[0] == params
    assert given == before


REFUSED: list[tuple[str, Any]] = [
    *(("custom_params", value) for value in ([1], "x", 5, 0.5, True, [], "", 0)),
    *(("n", value) for value in (0, -1, 1.5, 1 << 40, True, "2")),
    *(("top_k", value) for value in (1 << 31, 1 << 40, 1 << 70, -2, 0.5, "5", math.nan)),
    *(("min_new_tokens", value) for value in (-1, 1 << 31, 1 << 64, [1])),
    *(("max_new_tokens", value) for value in (-1, "5", math.inf, [5])),
    *(("stream_interval", value) for value in (0, -1, 1 << 63)),
    *(("temperature", value) for value in (-1, math.nan, math.inf, 1e39, "hot", [1])),
    *(("top_p", value) for value in (0, 1.1, math.nan, "x")),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
    *(("frequency_penalty", value) for value in (2.1, math.nan, math.inf)),
    ("frequency_penalty", {}),
    *(("presence_penalty", value) for value in (-2.1, math.nan)),
    *(("repetition_penalty", value) for value in (0, -1, 2.1, math.nan)),
    *(("logit_bias", {key: 1.0}) for key in ("100", "-1", "x", "", "1.5", 1 << 70)),
    *(("logit_bias", {"5": value}) for value in (math.nan, math.inf, 1e39, None)),
    ("logit_bias", {"5": []}),
    ("logit_bias", [1]),
    *(("sampling_seed", value) for value in (1 << 63, -(1 << 63) - 1, 1.5, "7")),
    *(("stop_token_ids", value) for value in (5, ["x"], [[1]], [math.nan], "ab", {"a": 1})),
    *(("stop", value) for value in (5, [5], ["a"] * 33, {"a": 1})),
    *(("stop_regex", value) for value in ("(", "a{99999999999}", [")"], 5, "a" * 257)),
    *(("json_schema", value) for value in ({"type": "object"}, 5, ["x"])),
    *((name, 5) for name in ("regex", "ebnf", "structural_tag", "ignore_eos", "watermark")),
    ("beam_width", 0),
    ("is_normalized", True),
    ("no_such_field", 1),
]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_a_sampling_parameter_out_of_range_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        resolved(sampling_params={name: value})
    with pytest.raises(RequestError, match=name):
        resolved(text=["a", "b"], sampling_params=[{}, {name: value}])


@pytest.mark.parametrize("name", [f.name for f in msgspec.structs.fields(SamplingParams)])
def test_no_value_of_a_sampling_parameter_raises_another_error(name: str) -> None:
    """An error of another kind would skip the check of the request."""
    odd = [nested(5000), {1: nested(5000)}, 1 << 20000, math.nan, "\ud800é", b"\xff", object(), {}]
    for value in odd:
        try:
            resolved(sampling_params={name: value})
        except RequestError as error:
            assert len(str(error)) < 2000  # noqa: PT017 - the length of any refusal


@pytest.mark.parametrize("params", [5, "x", [5], [{}, "x"], True], ids=repr)
def test_sampling_params_must_be_objects(params: object) -> None:
    with pytest.raises(RequestError, match="must be an object"):
        resolved(text=["a", "b"], sampling_params=params)
    with pytest.raises(RequestError, match="must be an object"):
        prompts.strip(MANAGER, ["a", "b"][: len(params) if isinstance(params, list) else 2], params)


REFUSED_REQUEST: list[tuple[str, object]] = [
    *(("input_ids", [value]) for value in (-1, VOCAB, 1 << 31, 1 << 63, "x")),
    *(("input_ids", [[5], value]) for value in ([VOCAB], [-1], [], ["x"], [[1]])),
    *(("top_logprobs_num", value) for value in (-1, VOCAB + 1, 10**6, 1 << 40, [0, 101], "5")),
    *(("logprob_start_len", value) for value in (-2, 1 << 63, [-1, -2], 0.5)),
    *(("custom_logit_processor", value) for value in ("x", "5", "{}", '{"callable": "zz"}')),
    *(("custom_logit_processor", value) for value in (["x"], "[" * 5000, 5)),
    *((name, [0]) for name in ("logprob_start_len", "top_logprobs_num")),
    ("sampling_params", []),
    *(("session_params", value) for value in ("x", [1], 5)),
    *(("offset", value) for value in (0.5, "x", [1])),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_REQUEST, ids=repr)
def test_a_field_out_of_range_is_refused_by_its_name(name: str, value: object) -> None:
    known = name not in ("offset", "no_such_field")
    with pytest.raises(RequestError, match=name):
        resolved(**{name: value} if known else {"session_params": {name: value}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rid", value) for value in ("", "HEALTH_CHECK_1", ["a", ""], 5, ["a", 5])),
        *((name, [1]) for name in ("token_indices_to_pool", "multi_item_delimiter_indices")),
        *((name, "x") for name in ("http_worker_ipc", "lora_id", "positional_embed_overrides")),
    ],
    ids=repr,
)
def test_a_client_sets_no_field_of_the_server(name: str, value: object) -> None:
    obj: Any = GenerateReqInput(text="Hi", **{name: value})
    with pytest.raises(RequestError, match=name):
        guesses.resolve_of_client(MANAGER, obj)
    guesses.resolve_request(MANAGER, obj)


def test_embeddings_have_the_shape_and_the_type_of_the_model() -> None:
    good = [[0.5] * HIDDEN] * 3
    resolved(text=None, input_embeds=good)
    resolved(text=None, input_embeds=[good, good[:1]])
    wrong: Any
    for wrong in ([[0.5]], [], [[]], [good, []], [good, [[0.5]]], [[math.nan] * HIDDEN], [["x"]]):
        with pytest.raises(RequestError, match=f"input_embeds is .* lists of {HIDDEN} numbers"):
            resolved(text=None, input_embeds=wrong)
    config = SimpleNamespace(**vars(MANAGER.model_config) | {"dtype": torch.float32})
    manager = SimpleNamespace(**vars(MANAGER) | {"model_config": config})
    with pytest.raises(RequestError, match=r"input_embeds need a model in torch\.bfloat16"):
        guesses.resolve_request(manager, GenerateReqInput(input_embeds=good))


def test_a_field_may_have_a_value_for_each_prompt() -> None:
    for name in ("logprob_start_len", "top_logprobs_num"):
        resolved(text=["a", "b"], **{name: [0, 1]})
        resolved(**{name: 1})
    for made in ('{"callable": "80"}', ['{"callable": "80"}', None]):
        resolved(text=["a", "b"], custom_logit_processor=made)


def test_the_answers_of_a_request_are_limited() -> None:
    most = fields.MAX_SAMPLES
    assert resolved(text=["a"] * (most + 1))
    assert resolved(text=["a"] * 2, sampling_params={"n": most // 2})
    for asked in ({"text": ["a"] * 2}, {"input_ids": [[1], [2]]}):
        with pytest.raises(RequestError, match="n is .*, but must be at most"):
            resolved(**asked, sampling_params={"n": most // 2 + 1})


def tokenized(input_ids: list[int], **fields_of_request: Any) -> None:
    obj = GenerateReqInput(text="Hi", **fields_of_request)
    obj.normalize_batch_and_arguments()
    prompts.tokenized(MANAGER, obj, input_ids)


def test_a_prompt_has_only_tokens_of_the_model() -> None:
    tokenized([0, VOCAB - 1])
    with pytest.raises(RequestError, match="the prompt is .*, but must be"):
        tokenized([0, VOCAB])
    tokenized([0, VOCAB], image_data="an image")


def test_the_log_probabilities_of_a_request_are_limited() -> None:
    all_of_them = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": VOCAB}
    tokenized([1] * 100, **all_of_them, sampling_params={"max_new_tokens": 10})
    with pytest.raises(RequestError, match="top_logprobs_num"):
        tokenized([1] * (1 << 18), **all_of_them, sampling_params={"max_new_tokens": 10})
    with pytest.raises(RequestError, match="max_new_tokens"):
        tokenized([1], **all_of_them)
    tokenized([1], **{**all_of_them, "return_logprob": False})


VERIFIED = {"token_ids_logprob", "routed_dp_rank", "priority"}
"""Fields whose numbers SGLang checks before it sends the request to the scheduler."""
INERT = {
    "stop_str_max_len": "SGLang computes it",
    "stop_regex_max_len": "SGLang computes it",
    "routed_experts_start_len": "the scheduler checks it",
    "bootstrap_port": "only with disaggregation, which QSPEC refuses",
    "bootstrap_room": "only with disaggregation, which QSPEC refuses",
    "decode_tp_size": "only with disaggregation, which QSPEC refuses",
    "disagg_prefill_dp_rank": "only with disaggregation, which QSPEC refuses",
    "num_items_assigned": "only with disaggregation, which QSPEC refuses",
    "data_parallel_rank": "another name of routed_dp_rank",
    "max_thinking_tokens": "compared with a count only",
    "received_time": "a time for metrics",
    "max_dynamic_patch": "for the processor of images, in the process that serves clients",
    "min_dynamic_patch": "for the processor of images, in the process that serves clients",
    "image_max_dynamic_patch": "for the processor of images, in the process that serves clients",
    "video_max_dynamic_patch": "for the processor of images, in the process that serves clients",
    "multi_item_delimiter_indices": "only with --enable-mis",
}
"""Other numeric fields, with the reason why no number harms the scheduler."""
OWN = {name for name, _ in (*REFUSED, *REFUSED_REQUEST)} | {"input_embeds", "token_indices_to_pool"}
"""Fields that QSPEC checks."""
RENAMED = {
    "prompt": "input_ids",
    "logprobs": "top_logprobs_num",
    "top_logprobs": "top_logprobs_num",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "query": "input_ids",
    "items": "input_ids",
    "label_token_ids": "token_ids_logprob",
}
"""Fields of the other endpoints by the field of `GenerateReqInput` or `SamplingParams`."""
UNUSED = {
    *("best_of", "max_tool_calls", "reasoning_effort", "keep_alive", "context"),
    # For embedding models; SGLang refuses or ignores them with other models.
    *("embed_override_token_id", "query_embed_overrides", "item_embed_overrides"),
}
"""Numeric fields of the other endpoints that do not reach the scheduler."""


def numeric(of: type) -> set[str]:
    """The fields of a type of SGLang that may hold numbers."""

    def may(kind: Any) -> bool:
        return kind in (int, float) or any(may(part) for part in typing.get_args(kind))

    if issubclass(of, BaseModel):
        return {name for name, field in of.model_fields.items() if may(field.annotation)}
    return {name for name, kind in typing.get_type_hints(of).items() if may(kind)}


@pytest.mark.parametrize(
    "of",
    [
        *(SamplingParams, GenerateReqInput, CompletionRequest, ChatCompletionRequest),
        *(ResponsesRequest, AnthropicMessagesRequest, OllamaChatRequest, OllamaGenerateRequest),
        ScoringRequest,
    ],
)
def test_somebody_has_decided_about_each_numeric_field(of: type) -> None:
    """A new release of SGLang may have new fields."""
    found = {RENAMED.get(name, name) for name in numeric(of) - UNUSED}
    assert found - OWN - VERIFIED - set(INERT) == set()
