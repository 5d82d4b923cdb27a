"""Recorded requests (`benchmark.record`), decoded greedily again with trees and without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import NDArray

OWN = Path(__file__).parent / "completions.json"
"""Completions of our own prompts by the demo's models."""


@dataclass(frozen=True)
class Recorded:
    """What was recorded of one request, in token ids."""

    prompt_ids: list[int]
    target_ids: list[int]
    draft_ids: list[list[int]]
    """The first is greedy."""


def load(path: Path) -> list[Recorded]:
    """Read a recording."""
    return [Recorded(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def accepted(
    token_ids: NDArray, parents: NDArray, size: int, target_ids: list[int], done: int
) -> list[int]:
    """The nodes of a tree of `size` that greedy verification accepts after `done` tokens."""
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
