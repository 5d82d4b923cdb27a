"""Converts answers of all endpoints, whole or streamed, to one form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.soak.templates import CHAT, GENERATE

ABORT = "abort"
"""Finish reason of a request that was aborted."""


@dataclass(frozen=True)
class Part:
    """One of the `n` answers to a request; an abort or a hang-up may cut it off."""

    text: str
    output_ids: tuple[int, ...] | None
    """Output token ids; None from the OpenAI endpoints."""
    reason: str | None
    """Finish reason, such as `stop`, `length` or `abort`; None before the end."""
    matched: str | None
    """Stop string or token id that ended the answer; None if none did."""


@dataclass(frozen=True)
class Answer:
    """All parts of an answer, in order, and the server's token counts."""

    parts: tuple[Part, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    """Tokens of all parts; None if the server has not reported them."""


def whole(path: str, data: Any) -> Answer:
    """An answer in one piece. Raises KeyError, TypeError or AttributeError if it is malformed."""
    if path == GENERATE:
        return _of_items(data if isinstance(data, list) else [data])
    return _of_choices(path, [data])


def streamed(path: str, pieces: Iterable[Any]) -> Answer:
    """An answer from its pieces; the last ones may be missing. Errors as in `whole`."""
    if path == GENERATE:
        # Each piece repeats the text and the tokens of the pieces before it.
        latest = {piece.get("index", 0): piece for piece in pieces}
        return _of_items([latest[index] for index in sorted(latest)])
    return _of_choices(path, pieces)


def _of_choices(path: str, pieces: Iterable[Any]) -> Answer:
    """An answer of an OpenAI endpoint."""
    texts: dict[int, list[str]] = {}
    ends: dict[int, tuple[str | None, str | None]] = {}
    usage: dict[str, int] = {}
    for piece in pieces:
        usage = piece.get("usage") or usage
        for choice in piece["choices"]:
            index = choice["index"]
            message = choice["message"] if "message" in choice else choice.get("delta")
            text = message.get("content") if path == CHAT else choice["text"]
            texts.setdefault(index, []).append(text or "")
            if choice.get("finish_reason"):
                ends[index] = (choice["finish_reason"], _shown(choice.get("matched_stop")))
    parts = tuple(
        Part("".join(texts[index]), None, *ends.get(index, (None, None))) for index in sorted(texts)
    )
    return Answer(parts, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _of_items(items: Sequence[Any]) -> Answer:
    parts = []
    for item in items:
        ended = item["meta_info"]["finish_reason"] or {}
        reason, matched = ended.get("type"), _shown(ended.get("matched"))
        parts.append(Part(item["text"], tuple(item["output_ids"]), reason, matched))
    metas = [item["meta_info"] for item in items]
    return Answer(
        tuple(parts),
        # A request that is aborted while it waits has none.
        metas[0].get("prompt_tokens") if metas else None,
        sum(meta["completion_tokens"] for meta in metas),
    )


def _shown(matched: object) -> str | None:
    return None if matched is None else str(matched)
