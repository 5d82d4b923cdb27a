"""SGLang's native gRPC endpoint, which takes raw prompts. SGLang's package has no schema of it."""

import re

import grpc
import pytest

from benchmark.harness.server import Server

pytestmark = pytest.mark.server


def text_generate(server: Server, text: str) -> bytes:
    """The first message of the answer. Raises grpc.RpcError."""
    port = server.command[server.command.index("--grpc-port") + 1]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/sglang.runtime.v1.SglangService/TextGenerate")
        # Field 1 of protobuf's wire format, with its length in one byte.
        message = bytes([10, len(text)]) + text.encode()
        answer: bytes = next(call(message, timeout=120))
        return answer


def prompt_tokens(server: Server, text: str) -> int:
    found = re.search(rb"prompt_tokens\x12.(\d+)", text_generate(server, text))
    assert found is not None
    return int(found[1])


def test_tags_are_stripped_from_prompts(server: Server) -> None:
    plain = prompt_tokens(server, "Name the capital of France.")
    tagged = "Name the <NGRAMGUESS>Paris</NGRAMGUESS>capital of France."
    assert prompt_tokens(server, tagged) == plain


def test_a_malformed_guess_is_an_error_with_its_reason(server: Server) -> None:
    with pytest.raises(grpc.RpcError, match="character 1 closes nothing"):
        text_generate(server, "a</NGRAMGUESS>b")
