"""Requests that clients send every day get the same answers from servers with QSPEC and without.

Sampled answers and those with penalties differ (docs/losslessness.md), so only their status counts.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.server.running import QSPEC
from test.preloaded.server import Server
from test.random_llama import write_random_llama

pytestmark = [pytest.mark.server, pytest.mark.thorough]

TEXT = "one two one two one"
MESSAGES = [{"role": "user", "content": "Name three colours, three colours, three."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
SAMPLING: list[dict[str, Any]] = [
    *({}, {"n": 2}, {"n": 1}, {"max_new_tokens": 0}, {"max_new_tokens": None}),
    *({"sampling_seed": 3, "temperature": 1}, {"sampling_seed": 3, "temperature": 1, "n": 2}),
    *({"stop": "x"}, {"stop": ["x", "y"]}, {"stop_token_ids": [5]}, {"stop_regex": "[xyz]+"}),
    *({"top_k": 5}, {"top_k": -1}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 2}),
    *({"frequency_penalty": 1.0}, {"presence_penalty": -1}, {"repetition_penalty": 1.2}),
    *({"min_new_tokens": 4}, {"ignore_eos": True}, {"skip_special_tokens": False}),
    *({"spaces_between_special_tokens": False}, {"no_stop_trim": True}, {"stream_interval": 2}),
    *({"json_schema": json.dumps(SCHEMA)}, {"regex": "[0-9]{3}"}, {"ebnf": 'root ::= "a"'}),
    *({"structural_tag": json.dumps(TAG)}, {"logit_bias": {"5": 3.0}}),
    *({"custom_params": {"a": 1}}, {"custom_params": None}),
]
OPENAI: list[dict[str, Any]] = [
    *({}, {"n": 2}, {"seed": 3}, {"seed": 3, "temperature": 1, "n": 2}, {"stop": "x"}),
    *({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    *({"logit_bias": {"5": 1}}, {"user": "u"}, {"presence_penalty": 0.5}, {"top_p": 0.9}),
    *({"top_k": 3}, {"min_p": 0.1}, {"regex": "[ab]+"}, {"min_tokens": 3}, {"rid": "q"}),
]
REQUESTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "/generate": (
        {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        [
            *({"sampling_params": {"temperature": 0, "max_new_tokens": 8, **s}} for s in SAMPLING),
            *({"text": ["a b", "c d"]}, {"text": ["a b", "a b"]}, {"stream": True}),
            *({"text": None, "input_ids": ids} for ids in ([5, 6, 5, 6], [[5, 6], [5, 6]])),
            {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": n} for n in (3, 4)]},
            {"text": None, "input_ids": [5, 5], "sampling_params": {"sampling_seed": 1}},
            *({"return_logprob": True, "top_logprobs_num": 2}, {"rid": "abc"}, {"priority": 3}),
            *({"return_logprob": True, "logprob_start_len": 0}, {"extra_key": "k"}),
            {"text": ["a b", "c"], "return_logprob": [True, False], "top_logprobs_num": [1, 0]},
            *({"text": ["a", "b"], "rid": rid} for rid in (["r1", "r2"], "before")),
            *({"session_params": {}}, {"image_data": None}, {"require_reasoning": True}),
        ],
    ),
    "/v1/completions": (
        {"model": "m", "prompt": TEXT, "temperature": 0, "max_tokens": 8},
        [
            *OPENAI,
            *({"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"suffix": "x"}),
            *({"prompt": given} for given in (["a", "b"], [5, 6, 5], [[5, 6], [7]])),
            *({"prompt": [5, 6, 5], "seed": 3}, {"prompt": ["a", "a"], "seed": 4}),
            *({"best_of": 1}, {"max_tokens": 0}, {"json_schema": json.dumps(SCHEMA)}),
        ],
    ),
    "/v1/chat/completions": (
        {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 8},
        [
            *OPENAI,
            *({"logprobs": True, "top_logprobs": 3}, {"max_completion_tokens": 5}),
            *({"response_format": {"type": kind}} for kind in ("text", "json_object")),
            *({"response_format": FORMAT}, {"reasoning_effort": "low"}),
            *({"tools": [TOOL], "tool_choice": choice} for choice in ("auto", "none", "required")),
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            *({"tools": [TOOL], "stream": True}, {"separate_reasoning": False}),
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            {"messages": [{"role": "system", "content": "s"}, *MESSAGES]},
        ],
    ),
    "/v1/messages": (
        {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 8},
        [
            *({}, {"system": "s"}, {"stop_sequences": ["x"]}, {"stream": True}, {"top_k": 3}),
            *({"tools": [{"name": "f", "input_schema": SCHEMA}]}, {"metadata": {"user_id": "u"}}),
            *({"thinking": {"type": "disabled"}}, {"top_p": 0.9}),
        ],
    ),
    "/v1/responses": (
        {"model": "m", "input": TEXT, "temperature": 0, "max_output_tokens": 8},
        [
            *({}, {"instructions": "s"}, {"stream": True}, {"store": False}, {"user": "u"}),
            *({"text": {"format": {"type": "text"}}}, {"reasoning": {"effort": "low"}}),
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            *({"input": [{"role": "user", "content": "hi"}]}, {"top_p": 0.9}, {"metadata": {}}),
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        ],
    ),
    "/api/chat": (
        {"model": "m", "messages": MESSAGES, "stream": False},
        [{"options": {"temperature": 0, "num_predict": 8, **o}} for o in ({}, {"stop": ["x"]})],
    ),
    "/api/generate": (
        {"model": "m", "prompt": TEXT, "stream": False},
        [{"options": {"temperature": 0, "num_predict": 8, **o}} for o in ({}, {"top_k": 3})],
    ),
    "/v1/score": (
        {"model": "m", "query": "A", "items": ["b", "c"], "label_token_ids": [5, 6]},
        [{}],
    ),
    "/tokenize": ({"model": "m", "prompt": TEXT}, [{}]),
}
"""By path: a request, and the changes to it."""
DIFFERENT = re.compile('"(?:temperature|(?:frequency|presence|repetition)_penalty)": (?!0[,}])')
"""A request that is sampled or has penalties, unless it sets no temperature."""
TEXTS = re.compile('"(?:text|content|reasoning_content|thinking|arguments|response|delta)": ?"')


def answers(target: Path, arguments: list[str]) -> dict[str, tuple[int, list[str]]]:
    """By request: the status and the texts of the answer of a server with these arguments."""
    common = [
        *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "4"),
        *("--max-total-tokens", "8192", "--context-length", "256", "--log-level", "error"),
        *("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3"),
    ]
    found = {}
    with (
        Server(target, [*common, *arguments]) as server,
        httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client,
    ):
        for path, (body, changes) in REQUESTS.items():
            for change in changes:
                asked = {**body, **change}
                answer = client.post(path, json=asked)
                said = answer.text
                texts = [
                    json.loads(f'"{_until_quote(said[m.end() :])}"') for m in TEXTS.finditer(said)
                ]
                found[f"{path} {json.dumps(asked)}"] = answer.status_code, texts
    return found


def _until_quote(text: str) -> str:
    match = re.match(r'(?:[^"\\]|\\.)*', text)
    return match[0] if match else ""


def test_each_answer_is_that_of_a_server_without_qspec(models: DemoModels, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    target = write_random_llama(tmp_path / "target", models, **sizes, **heads)
    plain, ours = answers(target, []), answers(target, list(QSPEC))
    assert len(plain) == sum(len(changes) for _, changes in REQUESTS.values())
    for request, (status, texts) in plain.items():
        assert ours[request][0] == status, request
        sampled = DIFFERENT.search(request) or '"temperature": ' not in request
        if not sampled and '"stream": true' not in request:
            assert ours[request][1] == texts, request
    assert sum(status == 200 for status, _ in plain.values()) > 90
