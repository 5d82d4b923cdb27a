"""Which draft tokens a tree is spent on: the likeliest ones, wherever they hang.

The streams that match are merged into a tree on the fly, best first. A stream's word counts with
its odds (`evidence`); a token's chance after its parent is its streams' share of all odds there,
with one part in the whole for "none of them". A node's score is the product along its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from sglang_qspec.trie.arena import TokenArena
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.tree import DraftTree

Place = tuple[int, int, Source, tuple[float, ...]]
"""(node, match length up to it, its source, the source's odds by match length)."""

_Candidate = tuple[float, int, int, int, Source, list[Place]]
"""(minus score, order of discovery, parent in the tree, token, source, places after the token)."""


def grow(
    root: tuple[int, Source], places: Sequence[Place], arena: TokenArena, width: int, floor: float
) -> DraftTree:
    """The tree of at most `width` nodes, each with a score of at least `floor`.

    `root` is the last committed token; `places` are different nodes that carry it.
    """
    token_ids, sources, parents, scores = [root[0]], [root[1]], [0], [1.0]
    candidates: list[_Candidate] = []
    found = _add_children(candidates, 0, 0, 1.0, places, arena, floor)
    while candidates and len(token_ids) < width:
        negative, _, parent, token, source, after = heappop(candidates)
        token_ids.append(token)
        sources.append(source)
        parents.append(parent)
        scores.append(-negative)
        if len(token_ids) < width:
            node = len(token_ids) - 1
            found = _add_children(candidates, found, node, -negative, after, arena, floor)
    return DraftTree(tuple(token_ids), tuple(parents), tuple(sources), tuple(scores))


def _add_children(
    candidates: list[_Candidate],
    found: int,
    parent: int,
    score: float,
    places: Sequence[Place],
    arena: TokenArena,
    floor: float,
) -> int:
    """Push the continuations of `places`; `found` plus their number."""
    following, token_of = arena.next, arena.token
    total = 1.0
    weights: dict[int, float] = {}
    heaviest: dict[int, tuple[float, Source]] = {}
    after: dict[int, list[Place]] = {}
    for node, length, source, odds in places:
        child = following[node]
        if not child:
            continue
        weight = odds[length]
        total += weight
        token = token_of[child]
        place = (child, length + 1 if length + 1 < len(odds) else length, source, odds)
        if token not in weights:
            weights[token] = weight
            heaviest[token] = (weight, source)
            after[token] = [place]
            continue
        weights[token] += weight
        after[token].append(place)
        if weight > heaviest[token][0]:
            heaviest[token] = (weight, source)
    for token, weight in weights.items():
        chance = score * weight / total
        if chance >= floor:
            found += 1
            candidate = (-chance, found, parent, token, heaviest[token][1], after[token])
            heappush(candidates, candidate)
    return found
