"""Reads recorded requests (`benchmark.record`), and verifies trees greedily without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

OWN = Path(__file__).parent / "completions.json"
"""Completions of our own prompts by the demo models."""
LOOKAHEAD = 16
"""Maximum tokens of a step draft ahead of the output."""
Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Recorded:
    """A recorded request, in token ids."""

    prompt_ids: list[int]
    target_ids: list[int]
    draft_ids: list[list[int]]
    """Completions; the first is greedy."""
    step_drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    """Output length at which each step draft begins, and its tokens, while the target commits one
    token at a time. A draft ends where the target diverges from it."""


def load(path: Path) -> list[Recorded]:
    """Read a recording."""
    return [Recorded(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def accepted(
    token_ids: Ids, parents: Ids, size: int, target_ids: list[int], done: int
) -> list[int]:
    """The nodes of a tree of `size` nodes that greedy verification accepts after `done` tokens."""
    nodes: list[int] = []
    at = 0
    for token in target_ids[done:]:
        for node in range(at + 1, size):
            if parents[node] == at and token_ids[node] == token:
                at = node
                nodes.append(node)
                break
        else:
            break
    return nodes
