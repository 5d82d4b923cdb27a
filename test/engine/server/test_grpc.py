"""SGLang's native gRPC endpoint, which takes raw prompts. SGLang's package has no schema of it."""

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmark.harness.server import Server

pytestmark = pytest.mark.server

TEXTS = ("日本語、例えば「猫」と「犬」です。", "我喜欢🐱和🐶，你呢？", "세계 हिन्दी ภาษา é🇯🇵")

FIELDS = {
    "Sampling": "1 float temperature, 8 int32 max_new_tokens, 15 string regex",
    "Request": "1 string text, 2 Sampling sampling_params, 3 bool stream",
    "Entry": "1 string key, 2 string value",
    "Response": "1 string text, 2* Entry meta_info, 3 bool finished",
}
"""The fields of SGLang's messages that are used here, by message; `*` marks a list."""


def message_types() -> dict[str, Any]:
    """The classes of the messages, by name."""
    schema = descriptor_pb2.FileDescriptorProto(name="sglang", syntax="proto2")
    for message, fields in FIELDS.items():
        added = schema.message_type.add(name=message)
        for field in fields.split(", "):
            number, kind, name = field.split()
            one = added.field.add(name=name, number=int(number.rstrip("*")))
            one.label = one.LABEL_REPEATED if number.endswith("*") else one.LABEL_OPTIONAL
            if kind in FIELDS:
                one.type, one.type_name = one.TYPE_MESSAGE, kind
            else:
                one.type = getattr(one, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(name)) for name in FIELDS}


TYPES = message_types()


def text_generate(server: Server, text: str, **fields: Any) -> Iterator[Any]:
    """The messages of an answer. Raises grpc.RpcError."""
    port = server.command[server.command.index("--grpc-port") + 1]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            "/sglang.runtime.v1.SglangService/TextGenerate",
            request_serializer=TYPES["Request"].SerializeToString,
            response_deserializer=TYPES["Response"].FromString,
        )
        yield from call(TYPES["Request"](text=text, **fields), timeout=600)


def meta_info(message: Any, key: str) -> str:
    """A field of `meta_info`, as JSON."""
    found: str = next(entry.value for entry in message.meta_info if entry.key == key)
    return found


def prompt_tokens(server: Server, text: str) -> int:
    return int(meta_info(next(text_generate(server, text)), "prompt_tokens"))


def test_tags_are_stripped_from_prompts(server: Server) -> None:
    plain = prompt_tokens(server, "Name the capital of France.")
    tagged = "Name the <NGRAMGUESS>Paris</NGRAMGUESS>capital of France."
    assert prompt_tokens(server, tagged) == plain


def test_a_malformed_guess_is_an_error_with_its_reason(server: Server) -> None:
    with pytest.raises(grpc.RpcError, match="character 1 closes nothing"):
        list(text_generate(server, "a</NGRAMGUESS>b"))


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_repeats_no_character(server: Server, text: str) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 90, "regex": re.escape(text)}
    prompt = f"Say: <NGRAMGUESS>{text}</NGRAMGUESS>"
    pieces = list(text_generate(server, prompt, sampling_params=sampling, stream=True))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].finished
