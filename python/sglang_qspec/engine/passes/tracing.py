"""Records the passes of the requests that ask for `meta_info["qspec_trace"]`.

The record of a request is a list in its `customized_info`, with one item for each output token. It
travels to the client's process like the labels of `engine.frontend.provenance`. Everything in it is
on the host: the trees before the pass, and the outcome that each pass copies to the host anyway.
For a pass without such a request nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_qspec.controls import PREFIX
from sglang_qspec.engine.frontend.trace import KEY, MAX_NODES, MAX_PASSES, MORE, OMITTED, PREFILL
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.trie import DraftTrees, Source

_NAMES = [source.name.lower() for source in Source]


class Items(list[Any]):
    """One item for each output token of a request."""

    passes = 0
    """Number of described passes, `MAX_PASSES` after a cap was reached."""
    nodes = 0
    """Number of draft tokens in them."""

    def put(self, output_len: int, first: Any, tokens: int) -> None:
        """Add the items of a pass that gave this number of tokens after `output_len` tokens.

        Items of tokens that did not become output are dropped first.
        """
        del self[output_len:]
        self.append(first)
        self.extend([MORE] * (tokens - 1))


def begin(req: Any) -> None:
    """Start the record of a request that asks for it. A retracted request keeps its record."""
    asked = (req.sampling_params.custom_params or {}).get(PREFIX + "return_trace", False)
    if asked and _items_of(req) is None:
        req.customized_info = {**(req.customized_info or {}), KEY: Items()}


def extend(
    reqs: Sequence[Any],
    output_lens: Sequence[int] | None = None,
    accepted: Sequence[Sequence[int]] | None = None,
) -> None:
    """Record the tokens of a prefill: `accepted` draft tokens, and one token of the target."""
    for row, req in enumerate(reqs):
        if (items := _items_of(req)) is not None:
            output_len = len(req.output_ids) if output_lens is None else output_lens[row]
            tokens = 1 if accepted is None else 1 + len(accepted[row])
            del items[output_len:]
            items.extend([PREFILL] * tokens)


class PassTrace:
    """One decode pass with requests that ask for a trace, from its start to its settlement."""

    def __init__(self, rids: Sequence[str]) -> None:
        self._rids = rids
        self._began = time.monotonic()
        self._ended: float | None = None
        self._seen: dict[str, tuple[float, list[int]]] = {}
        """By rid: the factor of the scores, and the tokens of the longest match."""

    @classmethod
    def of(cls, reqs: Sequence[Any]) -> PassTrace | None:
        """The trace of a pass that begins now; None if no request asks for one."""
        rids = [req.rid for req in reqs if _items_of(req) is not None]
        return cls(rids) if rids else None

    def look_up(self, active: Speculator) -> None:
        """Note what the trees of the pass were chosen by, before a commit changes it."""
        for rid in self._rids:
            live = active.live(rid)
            if live is not None:
                self._seen[rid] = live.credit.factor, live.match_ids(active.sources.paused)

    def end(self) -> None:
        """Note the end of the pass, unless it has ended."""
        self._ended = self._ended or time.monotonic()

    def record(
        self,
        reqs: Sequence[Any],
        trees: DraftTrees | None,
        accepted: Sequence[Sequence[int]],
        output_lens: Sequence[int],
        *,
        pipeline: str,
        batch_requests: int,
        batch_rows: int,
    ) -> None:
        """Record the pass, which ends now unless it has ended, for those of `reqs` that ask.

        `trees` are the trees of `reqs`, None for a pass without drafts. `accepted` has the accepted
        nodes of each tree, and `output_lens` the output lengths before the pass.
        """
        self.end()
        assert self._ended is not None
        milliseconds = round((self._ended - self._began) * 1e3, 3)
        for row, req in enumerate(reqs):
            items = _items_of(req)
            if items is None:
                continue
            size = 1 if trees is None else int(trees.sizes[row])
            first: Any = OMITTED
            if items.passes < MAX_PASSES and items.nodes + size - 1 <= MAX_NODES:
                items.passes += 1
                items.nodes += size - 1
                factor, match_ids = self._seen.get(req.rid, (1.0, []))
                first = {
                    "pass": {
                        "rows": size,
                        "batch_requests": batch_requests,
                        "batch_rows": batch_rows,
                        "ms": milliseconds,
                        "pipeline": pipeline,
                    },
                    "match_ids": match_ids,
                    "tree": _tree_of(trees, row, factor),
                    "path": [node - 1 for node in accepted[row]],
                }
            else:
                items.passes = MAX_PASSES
            items.put(output_lens[row], first, len(accepted[row]) + 1)


def _tree_of(trees: DraftTrees | None, row: int, factor: float) -> dict[str, list[Any]]:
    """A tree without its root; a parent is an index in these lists, or -1 for the root."""
    if trees is None:
        return {"ids": [], "parents": [], "sources": [], "chances": []}
    nodes = slice(1, int(trees.sizes[row]))
    chances = (trees.scores[row, nodes] * factor).tolist()
    return {
        "ids": trees.token_ids[row, nodes].tolist(),
        "parents": (trees.parents[row, nodes] - 1).tolist(),
        "sources": [_NAMES[source] for source in trees.sources[row, nodes].tolist()],
        "chances": [round(min(chance, 1.0), 4) for chance in chances],
    }


def _items_of(req: Any) -> Items | None:
    return req.customized_info.get(KEY) if req.customized_info else None
