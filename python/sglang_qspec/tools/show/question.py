"""A question of the page, and the events of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Annotated, Any

import msgspec

from sglang_qspec.errors import RequestError
from sglang_qspec.guess_tags import GuessLimits, split
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.peers import reading
from sglang_qspec.tools.complete.pieces import end_of, labels, whole
from sglang_qspec.tools.complete.token_texts import TokenTexts
from sglang_qspec.tools.guesses.guess import joined

Event = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Match(msgspec.Struct):
    length: Count
    text: str | None


class _Tree(msgspec.Struct):
    ids: list[int]
    texts: list[str] | None
    parents: list[int]
    sources: list[str]
    chances: list[float]
    accepted: list[bool]


class _Pass(msgspec.Struct):
    """What the page reads of a pass (docs/trace.md)."""

    start: Count
    tokens: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    rows: Count
    batch_requests: Count
    batch_rows: Count
    ms: float | None
    pipeline: str
    match: _Match | None
    tree: _Tree


class Question(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the page asks for. The server checks the ranges of the values."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    chat: bool = True
    """Whether the prompt is a message in the model's chat template."""
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    seed: int | None = None
    """Sampling seed; None leaves the choice to the server."""
    completions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Completions drafted while the request waits; None for the server's setting."""
    speculate: bool = True

    @classmethod
    def read(cls, body: bytes) -> Question:
        """Read the JSON of a question. Raises RequestError with the field and what is allowed."""
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the question is not allowed: {error}") from None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of the request, without guesses."""
        custom: dict[str, Any] = {"qspec_enabled": False}
        if self.speculate:
            custom = {"qspec_return_provenance": True, "qspec_return_trace": True}
            if self.completions is not None:
                custom["qspec_completions"] = self.completions
        found: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "custom_params": custom,
        }
        if self.seed is not None:
            found["sampling_seed"] = self.seed
        return found


def ask(
    client: Client, question: Question, guesses: Callable[[str], list[str]] = lambda _prompt: []
) -> Generator[Event, None, None]:
    """Ask the server, and yield the events of the answer. Raises ClientError and GuessError.

    `guesses` finds guesses for a prompt, besides those in its tags.

    An event has new `tokens` (pairs of text and source), or, without speculation, new `text`. The
    last event has `end`, and the event before it all `passes` (docs/trace.md has their schema).
    """
    prompt, sampling = _request(client, question, guesses)
    begin = time.monotonic()
    with reading(client.url), closing(client.generate(prompt, sampling)) as pieces:
        if question.speculate:
            yield from _traced(client, pieces, begin)
        else:
            yield from _plain(pieces, begin)


def _request(
    client: Client, question: Question, guesses: Callable[[str], list[str]]
) -> tuple[str | list[int], dict[str, Any]]:
    """The prompt as the server takes it, and the sampling parameters.

    The server reads no tags in the ids of a chat, so the guesses of a chat are sent beside it.
    """
    sampling = question.sampling()
    message, own = split(question.prompt, GuessLimits()) if question.chat else (question.prompt, [])
    if question.speculate:
        texts = [*own, *guesses(message)]
        sampling["custom_params"] = joined(sampling["custom_params"], texts)
    return client.chat_ids(message) if question.chat else message, sampling


def _traced(client: Client, pieces: Iterator[dict[str, Any]], begin: float) -> Iterator[Event]:
    texts = TokenTexts(client.decode)
    piece: dict[str, Any] = {}
    sources: list[str] = []
    first = None
    for piece in whole(pieces):
        first = first or time.monotonic()
        sources = labels(piece)
        known = texts.tokens
        fresh = texts.take(piece["text"], piece["output_ids"])
        tokens = list(zip(fresh, sources[known:], strict=False))
        msgspec.convert(tokens, list[tuple[str, str]])
        yield {"first": known, "tokens": tokens}
    trace = piece.get("meta_info", {}).get("qspec_trace", {})
    passes = trace.get("passes", [])
    msgspec.convert(passes, list[_Pass])
    if piece:
        # The first of the tokens that are left has the rest of the text.
        first_left = min(texts.tokens, max(0, len(sources) - 1))
        left = sources[first_left:]
        rest = [texts.finish(piece["text"]), *[""] * len(left)]
        tokens = list(zip(rest, left, strict=False))
        yield {"first": first_left, "tokens": tokens, "passes": passes}
    yield _end(piece, begin, first, trace.get("omitted_passes", 0))


def _plain(pieces: Iterator[dict[str, Any]], begin: float) -> Iterator[Event]:
    shown = ""
    piece: dict[str, Any] = {}
    first = None
    for piece in whole(pieces):
        first = first or time.monotonic()
        yield {"text": piece["text"][len(shown) :]}
        shown = piece["text"]
    yield _end(piece, begin, first, 0)


def _end(piece: dict[str, Any], begin: float, first: float | None, omitted: int) -> Event:
    """The last event of an answer. Raises ClientError if the server did not finish the answer."""
    reason = end_of(piece)
    now = time.monotonic()
    return {
        "end": {
            "seconds": now - begin,
            "first_seconds": (first or now) - begin,
            "tokens": piece["meta_info"]["completion_tokens"],
            "reason": reason,
            "qspec": piece["meta_info"].get("qspec"),
            "omitted_passes": omitted,
        }
    }
