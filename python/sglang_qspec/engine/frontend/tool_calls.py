"""Gives SGLang's streaming parsers of tool calls an answer token by token.

The parsers are written for pieces of one token. A pass that accepts drafts sends several tokens in
one piece. Of such a piece many parsers lose the text before a call, the end of a call, or the next
call, because they look at one change of state for each piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem

from sglang_qspec import config


def parse_stream_chunk(
    parse: Callable[..., tuple[str, list[ToolCallItem]]], parser: Any, chunk_text: str
) -> tuple[str, list[ToolCallItem]]:
    """Around `FunctionCallParser.parse_stream_chunk`."""
    text = ""
    calls: list[ToolCallItem] = []
    for piece in _pieces(chunk_text):
        more_text, more_calls = parse(parser, piece)
        text += more_text or ""
        _append(calls, more_calls)
    return text, calls


def parse_array(
    parse: Callable[..., StreamingParseResult], parser: Any, new_text: str, tools: Any
) -> StreamingParseResult:
    """Around `JsonArrayParser.parse_streaming_increment`, for calls that the client requires."""
    text = ""
    calls: list[ToolCallItem] = []
    for piece in _pieces(new_text):
        result = parse(parser, piece, tools)
        text += result.normal_text or ""
        _append(calls, result.calls)
    return StreamingParseResult(normal_text=text, calls=calls)


def _append(calls: list[ToolCallItem], more: list[ToolCallItem]) -> None:
    """Append parts of calls; further arguments of the last call join it, as they do at a client."""
    for part in more:
        last = calls[-1] if calls else None
        if last and last.tool_index == part.tool_index and not last.name and not part.name:
            last.parameters += part.parameters
        else:
            calls.append(part)


def _pieces(text: str) -> list[str]:
    # `sgl.Engine` serves without this module.
    from sglang.srt.entrypoints.http_server import _global_state

    manager = _global_state and _global_state.tokenizer_manager
    if len(text) < 2 or not manager or not config.is_qspec(manager.server_args):
        return [text]
    return token_texts(manager.tokenizer, text)


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """The texts of the tokens of `text`; tokens that share a character are one piece.

    The model may have written the text in other tokens. The parsers take both, since every token
    of the pieces is one that the model can write. Where a tokenizer without offsets changes the
    text, tokens stay together.
    """
    is_fast = getattr(tokenizer, "is_fast", False)
    ends = _ends_by_offset if is_fast else _ends_by_decoding
    cuts = sorted({0, *ends(tokenizer, text), len(text)})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _ends_by_offset(tokenizer: Any, text: str) -> Iterator[int]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for begin, end in encoded["offset_mapping"]:
        if end > begin:
            yield end


def _ends_by_decoding(tokenizer: Any, text: str) -> Iterator[int]:
    """Ends of tokens where the text so far is a beginning of the whole."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count in range(1, len(ids)):
        begin = tokenizer.decode(ids[:count])
        if text.startswith(begin):
            yield len(begin)
