"""How much one matching stream speaks for its next token. This is the whole policy on trust.

The odds are those that the stream's next token is the target's, by the stream's source and by how
many tokens of it matched: for one stream alone, odds / (odds + 1) is the chance. Streams that
propose the same token add up; streams that propose different ones share.

The chances were counted on recorded completions of SmolLM2-135M-Instruct (int8 drafts, sampled at
temperature 0.6, six kinds of prompts). A stream that is followed from its base was drafted from the
very text that is committed; one that was found by its last tokens only resembles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sglang_qspec.trie.source import Source


@dataclass(frozen=True, slots=True)
class _Trust:
    """Chance by match length: `first` at 1, then from `second` at 2 towards `most`."""

    first: float
    second: float
    most: float
    pace: float
    """What remains of the distance to `most` after each further token."""

    def chance(self, length: int) -> float:
        if length < 2:
            return self.first
        return self.most - (self.most - self.second) * self.pace ** (length - 2)


_FOUND = {
    (Source.QUEUE, True): _Trust(0.28, 0.60, 0.90, 0.87),
    (Source.QUEUE, False): _Trust(0.18, 0.48, 0.86, 0.87),
    (Source.GUESS, False): _Trust(0.25, 0.55, 0.95, 0.80),
    (Source.OUTPUT, False): _Trust(0.20, 0.52, 0.95, 0.87),
    (Source.PROMPT, False): _Trust(0.12, 0.45, 0.93, 0.85),
}
_FOLLOWED = {
    # The length counts the token before the stream's first one too.
    (Source.QUEUE, True): _Trust(0.85, 0.93, 0.985, 0.80),
    (Source.QUEUE, False): _Trust(0.58, 0.70, 0.91, 0.80),
    (Source.GUESS, False): _Trust(0.40, 0.65, 0.95, 0.75),
}


def odds(source: Source, greedy: bool, followed: bool, length: int) -> float:
    """Odds that the next token of a stream which matched `length` >= 1 tokens is the target's."""
    table = _FOLLOWED if followed else _FOUND
    chance = table[source, greedy and source is Source.QUEUE].chance(length)
    return chance / (1.0 - chance)


@lru_cache(maxsize=64)
def odds_row(source: Source, greedy: bool, followed: bool, max_match: int) -> tuple[float, ...]:
    """The odds for lengths 0 to `max_match`, as a table."""
    return tuple(odds(source, greedy, followed, max(length, 1)) for length in range(max_match + 1))
