"""Makes `meta_info["qspec_trace"]`: the passes of a request that asks for them, with texts.

The scheduler's process records the passes (`engine.passes.tracing`). Its record has one item
for each output token, so SGLang cuts it together with the tokens, at stops and into chunks. In the
process that serves clients, `AnswerTrace` turns the items into the documented form (docs/trace.md),
which the client gets with the end of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sglang_qspec.engine.frontend.provenance import is_padding

KEY = "qspec_trace"
VERSION = 1
MAX_PASSES = 2048
"""Maximum number of passes in the trace of one answer."""
MAX_NODES = 16384
"""Maximum number of draft tokens in the trace of one answer."""
MAX_BYTES = 1 << 20
"""Maximum size of the passes of one answer, in bytes of JSON."""

# Items that are no description of a pass.
PREFILL = 0
"""A token from the pass over the prompt."""
OMITTED = 1
"""The first token of a pass that is over a cap."""
MORE = 2
"""Another token of the same pass."""

_TRACE = "_qspec_trace"
"""Attribute of SGLang's state of a request that holds its `AnswerTrace`."""


class AnswerTrace:
    """The passes of one answer, in the order of its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` decodes the token ids; with None the texts are None."""
        self.passes: list[dict[str, Any]] = []
        self.omitted = 0
        """Number of passes left out because a cap was reached; they are the last ones."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._tokens = 0
        """Number of output tokens so far."""
        self._bytes = 0

    def take(self, items: Sequence[Any]) -> None:
        """Add the items of the next output tokens; all tokens of a pass come together."""
        firsts = [place for place, item in enumerate(items) if item != MORE]
        for place, end in pairwise([*firsts, len(items)]):
            if items[place] == OMITTED:
                self.omitted += 1
            elif items[place] != PREFILL:
                self._add(self._described(items[place], self._tokens + place, end - place))
        self._tokens += len(items)

    def _add(self, described: dict[str, Any]) -> None:
        self._bytes += len(json.dumps(described))
        if self._bytes > MAX_BYTES:
            self.omitted += 1
        else:
            self.passes.append(described)

    def _described(self, record: dict[str, Any], start: int, tokens: int) -> dict[str, Any]:
        """A pass that gave `tokens` output tokens from place `start` of the answer on."""
        ids, match_ids = record["tree"]["ids"], record["match_ids"]
        has_texts = self._tokenizer is not None
        match: dict[str, Any] | None = None
        if match_ids:
            text = self._tokenizer.decode(match_ids) if has_texts else None
            match = {"length": len(match_ids), "text": text}
        # A stop in the middle of the accepted tokens drops the tokens after it.
        path = set(record["path"][:tokens])
        tree = {
            "ids": ids,
            "texts": [self._text(token_id) for token_id in ids] if has_texts else None,
            **record["tree"],
            "accepted": [node in path for node in range(len(ids))],
        }
        return {"start": start, "tokens": tokens, **record["pass"], "match": match, "tree": tree}

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text

    @property
    def report(self) -> dict[str, Any]:
        """The trace in its documented form."""
        return {"version": VERSION, "passes": self.passes, "omitted_passes": self.omitted}


def add(
    meta_info: dict[str, Any], manager: Any, state: Any, items: Sequence[Any], *, finished: bool
) -> None:
    """Keep the `items` of a request's next tokens; put the trace into the last `meta_info`.

    The items of a request that does not ask are padding.
    """
    trace: AnswerTrace | None = getattr(state, _TRACE, None)
    if trace is None:
        if is_padding(items):
            return
        trace = AnswerTrace(manager.tokenizer)
        setattr(state, _TRACE, trace)
    trace.take(items)
    if finished:
        meta_info[KEY] = trace.report
