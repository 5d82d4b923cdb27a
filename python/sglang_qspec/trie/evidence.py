"""How much one matching stream speaks for its next token. This is the whole policy on trust.

The odds are those that the stream's next token is the target's, by the stream's source and by how
many tokens of it matched: for one stream alone, odds / (odds + 1) is the chance. Streams that
propose the same token add up; streams that propose different ones share.
"""

from __future__ import annotations

from functools import lru_cache

from sglang_qspec.trie.source import Source

_CHANCES: dict[tuple[Source, bool], tuple[float, float]] = {
    # After a match of one token, and after a long one; greedy completions apart.
    (Source.QUEUE, True): (0.20, 0.88),
    (Source.QUEUE, False): (0.15, 0.65),
    (Source.GUESS, False): (0.20, 0.85),
    (Source.OUTPUT, False): (0.08, 0.70),
    (Source.PROMPT, False): (0.08, 0.60),
}
_SATURATION = 0.7
"""Per matched token, the remaining distance to the chance after a long match shrinks to this."""


def odds(source: Source, greedy: bool, length: int) -> float:
    """Odds that the next token of a stream which matched `length` >= 1 tokens is the target's."""
    least, most = _CHANCES[source, greedy and source is Source.QUEUE]
    chance = most - (most - least) * _SATURATION ** (length - 1)
    return chance / (1.0 - chance)


@lru_cache(maxsize=64)
def odds_row(source: Source, greedy: bool, max_match: int) -> tuple[float, ...]:
    """The odds for lengths 0 to `max_match`, as a table."""
    return tuple(odds(source, greedy, max(length, 1)) for length in range(max_match + 1))
