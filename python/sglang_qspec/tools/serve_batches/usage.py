"""Adds up the tokens of a batch from its records."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sglang_qspec.tools.serve_batches.objects import InputDetails, OutputDetails, Usage


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None
    reasoning_tokens: int | None = 0
    input_tokens: int | None = 0
    """This and the next ones are those of /v1/responses."""
    output_tokens: int | None = 0
    input_tokens_details: _Cached | None = None
    output_tokens_details: _Reasoning | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Record(msgspec.Struct):
    response: _Response


def of(path: Path) -> Usage:
    """The tokens of all answers in a file of records. A strange figure counts as 0."""
    read = cached = written = reasoning = 0
    decoder = msgspec.json.Decoder(_Record)
    with path.open("rb") as file:
        for line in file:
            try:
                found = decoder.decode(line).response.body.usage
            except msgspec.MsgspecError:
                continue
            if found is None:
                continue
            read += found.prompt_tokens or found.input_tokens or 0
            written += found.completion_tokens or found.output_tokens or 0
            prompt = found.prompt_tokens_details or found.input_tokens_details
            if prompt is not None:
                cached += prompt.cached_tokens or 0
            output = found.completion_tokens_details or found.output_tokens_details
            if output is not None:
                reasoning += output.reasoning_tokens or 0
            else:
                reasoning += found.reasoning_tokens or 0
    return Usage(
        input_tokens=read,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=written,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=read + written,
    )
