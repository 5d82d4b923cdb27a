"""Labels each output token with its draft source or `target`, for requests that ask for it.

The list `meta_info["qspec_provenance"]` has one label for each output token. It is part of the
request's `customized_info`, which SGLang sends along with output tokens. SGLang cuts it with them,
at stops and into streamed chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang_qspec.controls import PREFIX
from sglang_qspec.trie import DraftTrees, Source

KEY = "qspec_provenance"
TARGET = "target"
_WORDS = [source.name.lower() for source in Source]


def begin(req: Any, by_default: bool) -> None:
    """Keep the list of a request that asks for it, or does not say and has it by default.

    That of a request that was retracted, and comes again, goes on.
    """
    asked = (req.sampling_params.custom_params or {}).get(PREFIX + "return_provenance", by_default)
    if asked and _words_of(req) is None:
        req.customized_info = {**(req.customized_info or {}), KEY: []}


def extend(reqs: Sequence[Any]) -> None:
    """A prompt's pass is done: the target chose a token, unless more of the prompt is to come."""
    for req in reqs:
        if (words := _words_of(req)) is not None:
            _add(words, req, ())


def record(
    reqs: Sequence[Any], trees: DraftTrees | None, accepted: Sequence[Sequence[int]]
) -> None:
    """A pass over `trees` is done: behind the `accepted` nodes the target chose a token.

    Without `trees` it is the one token of each request.
    """
    for row, req in enumerate(reqs):
        if (words := _words_of(req)) is not None:
            drafted = trees.sources[row, accepted[row]].tolist() if trees is not None else []
            _add(words, req, drafted)


def _add(words: list[str], req: Any, sources: Iterable[int]) -> None:
    """Drafted tokens and one of the target's follow the output so far.

    What was added before and did not become output, such as a token of a prompt's first part, goes.
    """
    del words[len(req.output_ids) :]
    words += [_WORDS[source] for source in sources]
    words.append(TARGET)


def _words_of(req: Any) -> list[str] | None:
    return req.customized_info.get(KEY) if req.customized_info else None


def is_others(values: Sequence[str | None]) -> bool:
    """Whether a request has no such list, and SGLang filled up its place beside one that has."""
    return not values or values[0] is None
