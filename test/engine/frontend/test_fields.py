"""Fields of a request that SGLang's scheduler could not serve are refused, and others are kept."""

import dataclasses
import math
import typing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_qspec.engine.frontend import fields, guesses, prompts
from sglang_qspec.errors import RequestError

VOCAB = 100
MANAGER = SimpleNamespace(
    server_args=SimpleNamespace(speculative_algorithm="QSPEC"),
    model_config=SimpleNamespace(vocab_size=VOCAB),
    sampling_params_class=SamplingParams,
    tokenizer=SimpleNamespace(encode=lambda text, **_: list(text)),
)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=8))


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


REFUSED: list[tuple[str, object]] = [
    *(("custom_params", value) for value in ([1], "x", 5, 0.5, True, [], "", 0)),
    *(("n", value) for value in (0, -1, 1.5, 1 << 40, True, "2")),
    *(("top_k", value) for value in (1 << 31, 1 << 40, 1 << 70, -2, 0.5, "5", math.nan)),
    *(("min_new_tokens", value) for value in (-1, 1 << 31, 1 << 64, [1])),
    *(("max_new_tokens", value) for value in (-1, "5", math.inf, [5])),
    *(("stream_interval", value) for value in (0, -1, 1 << 63)),
    *(("temperature", value) for value in (-1, math.nan, math.inf, 1e39, "hot", [1])),
    *(("top_p", value) for value in (0, 1.1, math.nan, "x")),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
    *(("frequency_penalty", value) for value in (2.1, math.nan, math.inf, {})),
    *(("presence_penalty", value) for value in (-2.1, math.nan)),
    *(("repetition_penalty", value) for value in (0, -1, 2.1, math.nan)),
    *(("logit_bias", {key: 1.0}) for key in ("100", "-1", "x", "", "1.5", 1 << 70)),
    *(("logit_bias", {"5": value}) for value in (math.nan, math.inf, 1e39, None, [])),
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("input_ids", [value]) for value in (-1, VOCAB, 1 << 31, 1 << 63)),
        *(("input_ids", [[5], value]) for value in ([VOCAB], [-1], [], ["x"], [[1]])),
        *(("top_logprobs_num", value) for value in (-1, VOCAB + 1, 10**6, 1 << 40, [0, 101], "5")),
        *(("logprob_start_len", value) for value in (-2, 1 << 63, [-1, -2], 0.5)),
    ],
    ids=repr,
)
def test_a_field_out_of_range_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        resolved(**{name: value})
