"""Lists the text fields of SGLang's HTTP endpoints that reach the model, and how tags are read.

This is for `--speculative-qspec-guess-tags user`, the default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
SHORT = {"temperature": 0, "max_new_tokens": 1}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "find", "input": {}}


@dataclass(frozen=True)
class Field:
    """A text field of an endpoint, and how to count the tokens that the model reads."""

    path: str
    name: str
    read: bool
    """True: tags are stripped. False: they are literal text."""
    body: Callable[[str], Body]
    tokens: Callable[[Any], int]

    def __str__(self) -> str:
        return f"{self.path} {self.name}"


def _usage(answer: Any) -> int:
    number: int = answer["usage"]["prompt_tokens"]
    return number


def _input_tokens(answer: Any) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens") or 0)


def _meta(answer: Any) -> int:
    number: int = answer["meta_info"]["prompt_tokens"]
    return number


def _chat(*messages: Body, **more: Any) -> Body:
    return {"model": "m", "max_tokens": 1, "temperature": 0, "messages": list(messages), **more}


def _user(content: Any = "Hello") -> Body:
    return {"role": "user", "content": content}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _openai(path: str, tokens: Callable[[Any], int] = _usage) -> list[Field]:
    """Fields of a body with OpenAI's chat messages."""

    def tool(content: str) -> Body:
        call = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
        result = {"role": "tool", "tool_call_id": "c1", "content": content}
        return _chat(_user(), call, result, _user())

    def system(content: str) -> Body:
        return _chat({"role": "system", "content": content}, _user())

    def assistant(content: str) -> Body:
        return _chat(_user(), {"role": "assistant", "content": content}, _user())

    return [
        Field(path, "user", True, lambda text: _chat(_user(text)), tokens),
        Field(path, "user part", True, lambda text: _chat(_user([_text(text)])), tokens),
        Field(path, "system", False, system, tokens),
        Field(path, "assistant", False, assistant, tokens),
        Field(path, "tool", False, tool, tokens),
    ]


def _anthropic(path: str, tokens: Callable[[Any], int]) -> list[Field]:
    def result(kind: str) -> Callable[[str], Body]:
        def body(text: str) -> Body:
            if kind == "search_result":
                block: Body = {"type": kind, "title": "t", "content": [_text(text)]}
                return _chat(_user([_text("Hello"), block]))
            block = {"type": kind, "tool_use_id": "c1", "content": text}
            used = {"role": "assistant", "content": [TOOL_USE]}
            return _chat(_user(), used, _user([block]))

        return body

    def assistant(content: str) -> Body:
        return _chat(_user(), {"role": "assistant", "content": content}, _user())

    return [
        Field(path, "user", True, lambda text: _chat(_user(text)), tokens),
        Field(path, "user block", True, lambda text: _chat(_user([_text(text)])), tokens),
        Field(path, "system", False, lambda text: _chat(_user(), system=text), tokens),
        Field(path, "assistant", False, assistant, tokens),
        Field(path, "tool result", False, result("tool_result"), tokens),
        Field(path, "search result", False, result("search_result"), tokens),
    ]


def _responses() -> list[Field]:
    def asked(value: Any, **more: Any) -> Body:
        return {"max_output_tokens": 8, "temperature": 0, "input": value, **more}

    def tool(text: str) -> Body:
        call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": text}
        return asked([_user(), call, output])

    def developer(text: str) -> Body:
        return asked([{"role": "developer", "content": text}, _user()])

    def part(text: str) -> Body:
        return asked([{"type": "message", **_user([{"type": "input_text", "text": text}])}])

    path = "/v1/responses"
    return [
        Field(path, "input", True, asked, _input_tokens),
        Field(path, "user", True, lambda text: asked([_user(text)]), _input_tokens),
        Field(path, "user part", True, part, _input_tokens),
        Field(
            path, "instructions", False, lambda text: asked("Hi", instructions=text), _input_tokens
        ),
        Field(path, "developer", False, developer, _input_tokens),
        Field(path, "tool output", False, tool, _input_tokens),
    ]


def _ollama() -> list[Field]:
    def tokens(answer: Any) -> int:
        return int(answer["prompt_eval_count"])

    def chat(*messages: Body) -> Body:
        options = {"temperature": 0, "num_predict": 1}
        return {"model": "m", "stream": False, "messages": list(messages), "options": options}

    def generate(prompt: str, **more: Any) -> Body:
        options = {"temperature": 0, "num_predict": 1}
        return {"model": "m", "stream": False, "prompt": prompt, "options": options, **more}

    def of(role: str) -> Callable[[str], Body]:
        return lambda text: chat(_user(), {"role": role, "content": text}, _user())

    return [
        Field("/api/chat", "user", True, lambda text: chat(_user(text)), tokens),
        *(Field("/api/chat", role, False, of(role), tokens) for role in ("system", "assistant")),
        Field("/api/generate", "prompt", True, generate, tokens),
        Field("/api/generate", "system", False, lambda text: generate("Hi", system=text), tokens),
    ]


def _raw() -> list[Field]:
    """The prompt is one text without roles, so the client wrote all of it."""

    def completion(text: str) -> Body:
        return {"model": "m", "prompt": text, "max_tokens": 1}

    def instance(text: str) -> Body:
        return {"instances": [{"text": text}], "parameters": {"sampling_params": SHORT}}

    def prompt(text: str) -> Body:
        return {"text": text, "sampling_params": SHORT}

    return [
        Field("/generate", "text", True, prompt, _meta),
        Field("/vertex_generate", "text", True, instance, lambda a: _meta(a["predictions"][0])),
        Field("/v1/completions", "prompt", True, completion, _usage),
    ]


def _scored() -> list[Field]:
    """Fields of texts that the model only scores; they get no drafts, so guesses have no use."""

    def score(query: str, item: str) -> Body:
        return {"model": "m", "query": query, "items": [item], "label_token_ids": [12, 13]}

    def decide(text: str) -> Body:
        question = {"id": "q", "type": "yes_no", "question": "Is it so?"}
        return {"model": "m", "input": text, "questions": [question]}

    def state(text: str) -> Body:
        questions = {"q": {"type": "noul", "instructions": "Is it so?"}}
        return {"model": "m", "state": text, "questions": questions}

    return [
        Field("/v1/score", "query", False, lambda text: score(text, "b"), _usage),
        Field("/v1/score", "items", False, lambda text: score("a", text), _usage),
        Field("/v1/decisions", "input", False, decide, _usage),
        Field("/v1/systemone", "state", False, state, _input_tokens),
    ]


def _tokenized(path: str) -> list[Field]:
    """Messages are tokenized as in chat; a prompt is plain text."""

    def count(answer: Any) -> int:
        return int(answer["count"])

    def prompt(text: str) -> Body:
        return {"model": "m", "prompt": text}

    return [Field(path, "prompt", False, prompt, count), *_openai(path, count)]


FIELDS = [
    *_raw(),
    *_openai("/v1/chat/completions"),
    *_openai("/invocations"),
    *_responses(),
    *_anthropic("/v1/messages", _input_tokens),
    *_anthropic("/v1/messages/count_tokens", lambda answer: int(answer["input_tokens"])),
    *_ollama(),
    *_scored(),
    *_tokenized("/tokenize"),
    *_tokenized("/v1/tokenize"),
]

REFUSED: dict[str, Body] = {
    "/add_external_corpus": {"corpus_id": "c", "documents": ["a"]},
    "/classify": {"text": "a"},
    "/encode": {"text": "a"},
    "/v1/classify": {"model": "m", "input": "a"},
    "/v1/embeddings": {"model": "m", "input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
"""Endpoints that a server with QSPEC refuses, each with a body that has a text."""

NO_PROMPT = frozenset(
    {
        # They describe the server, or change it.
        *("/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/ping", "/ready"),
        *("/health", "/health_generate", "/get_model_info", "/model_info", "/get_server_info"),
        *("/server_info", "/v1/models", "/v1/models/{model:path}", "/api/tags", "/api/show"),
        *("/v1/loads", "/set_internal_state", "/flush_cache", "/configure_logging"),
        *("/remove_external_corpus", "/list_external_corpora", "/hicache/storage-backend"),
        *("/hicache/storage-backend/clear", "/get_hicache_l3_cache_layout", "/start_profile"),
        *("/stop_profile", "/set_trace_level", "/freeze_gc", "/slow_down", "/pd_role_switch"),
        *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
        *("/dump_expert_distribution_record", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_ipc"),
        *("/update_weights_from_distributed", "/update_weight_version", "/begin_weight_update"),
        *("/end_weight_update", "/get_weights_by_name", "/weights_checker"),
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"),
        *("/init_weights_update_group", "/destroy_weights_update_group", "/load_lora_adapter"),
        *("/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
        # They act on live requests, or on answers.
        *("/open_session", "/close_session", "/abort_request", "/pause_generation"),
        *("/continue_generation", "/v1/responses/{response_id}"),
        *("/v1/responses/{response_id}/cancel", "/parse_function_call", "/separate_reasoning"),
        # They take token ids, or audio.
        *("/detokenize", "/v1/detokenize", "/v1/audio/transcriptions", "/v1/realtime"),
    }
)
"""Endpoints that take no text for the model."""
