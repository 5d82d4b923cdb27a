"""Kinds of answers, for which drafts are worth different amounts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum

SHARE = 0.75
"""A batch has a kind if at least this share of its requests has this kind."""


class AnswerKind(Enum):
    """How the tokens of an answer are chosen, and whether it has a guess.

    The kind of a batch is that of most of its requests.
    """

    GREEDY = "greedy"
    SAMPLED = "sampled"
    GRAMMAR = "grammar"
    """By a schema or another grammar, greedy or sampled."""
    GUESSED = "guessed"
    """The client sent a guess with the request; the tokens may be chosen in any way."""
    MIXED = "mixed"
    """A batch in which no kind prevails."""

    @classmethod
    def of_batch(cls, kinds: Sequence[AnswerKind]) -> AnswerKind:
        """The kind of a batch by the `kinds` of its requests, which are not empty."""
        kind, requests = Counter(kinds).most_common(1)[0]
        return kind if requests >= SHARE * len(kinds) else cls.MIXED
