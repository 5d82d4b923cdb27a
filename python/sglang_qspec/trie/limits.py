"""Caps on the size and the search effort of the tries."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.errors import ConfigError
from sglang_qspec.trie._native import MOST_MATCH, MOST_TOKENS


@dataclass(frozen=True)
class TrieLimits:
    """Caps of one trie and of all tries. Raises ConfigError for values that are not allowed."""

    vocab_size: int
    """Size of the target's vocabulary; a draft token id must be below it."""
    max_request_tokens: int = 16384
    """Draft tokens kept for one request; each stream counts as `STREAM_TOKENS` (4) extra tokens."""
    max_lookup_tokens: int = 16384
    """Number of most recent tokens of a request's prompt and output that are searched."""
    max_total_tokens: int = 4 << 20
    """Tokens kept for all requests together: drafts, prompts and outputs."""
    max_match: int = 32
    """Maximum length of a match in tokens; longer matches count as this long."""
    max_cursors: int = 24
    """Maximum number of matches that are followed at the same time; the longest are kept."""
    max_scan: int = 16
    """Maximum number of occurrences that a search for new matches visits, newest first: once in the
    drafts and once in the request's own text."""
    min_score: float = 0.02
    """Minimum estimated acceptance probability of a proposed draft token."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("vocab_size", 1, 2**31 - 1),
            ("max_cursors", 1, MOST_TOKENS),
            ("max_scan", 1, MOST_TOKENS),
            ("max_match", 2, MOST_MATCH),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, but must be from {least} to {most}")
        if not 0.0 < self.min_score < 1.0:
            raise ConfigError(f"min_score is {self.min_score}, but must be between 0 and 1")
        if not 1 <= self.max_request_tokens <= min(self.max_total_tokens, MOST_TOKENS):
            raise ConfigError(
                f"max_request_tokens is {self.max_request_tokens}, but must be from 1 to "
                f"max_total_tokens ({self.max_total_tokens}), at most {MOST_TOKENS}"
            )
        if not 2 * self.max_match <= self.max_lookup_tokens <= MOST_TOKENS:
            raise ConfigError(
                f"max_lookup_tokens is {self.max_lookup_tokens}, but must be from "
                f"{2 * self.max_match} (twice max_match) to {MOST_TOKENS}"
            )
