"""Kinds of answers, for which drafts are worth different amounts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

SHARE = 0.75
"""A batch has a kind if at least this share of its requests has this kind."""


class AnswerKind(Enum):
    """How the tokens of an answer are chosen; of a batch, how those of most requests are."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    GRAMMAR = "grammar"
    """By a schema or another grammar, greedy or sampled."""
    MIXED = "mixed"
    """A batch in which no kind prevails."""

    @classmethod
    def of_batch(cls, kinds: Sequence[AnswerKind]) -> AnswerKind:
        """The kind of a batch by the `kinds` of its requests, which are not empty."""
        kind, requests = Counter(kinds).most_common(1)[0]
        return kind if requests >= SHARE * len(kinds) else cls.MIXED
