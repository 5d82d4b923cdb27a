"""What one request's trie, and all tries together, may hold and try."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.errors import ConfigError


@dataclass(frozen=True)
class TrieLimits:
    """Caps of the tries. Raises ConfigError for a combination that is not allowed."""

    vocab_size: int
    """Draft tokens are below it: an id outside the target's vocabulary is never proposed."""
    max_request_tokens: int = 16384
    """Draft tokens (completions and guesses) kept for one request."""
    max_lookup_tokens: int = 16384
    """Tokens of a request's own prompt and output that are searched: the most recent ones."""
    max_total_tokens: int = 4 << 20
    """Tokens kept for all requests together, drafts and own text."""
    max_match: int = 32
    """Matches are not told apart beyond this length, in tokens."""
    max_cursors: int = 24
    """Places in the streams that are followed at the same time, the longest matches first."""
    max_scan: int = 16
    """Occurrences, newest first, that are looked at for a new match: in drafts and in text each."""
    min_score: float = 0.02
    """Draft tokens with a smaller estimated chance to be accepted are not proposed."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_cursors", "max_scan"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.max_match < 2:
            raise ConfigError(f"max_match is {self.max_match}, but must be at least 2")
        if not 0.0 < self.min_score < 1.0:
            raise ConfigError(f"min_score is {self.min_score}, but must be between 0 and 1")
        if self.max_request_tokens < 1 or self.max_total_tokens < self.max_request_tokens:
            raise ConfigError(
                f"max_request_tokens is {self.max_request_tokens}, but must be from 1 to "
                f"max_total_tokens ({self.max_total_tokens})"
            )
        if self.max_lookup_tokens < 2 * self.max_match:
            raise ConfigError(
                f"max_lookup_tokens is {self.max_lookup_tokens}, but must be at least "
                f"{2 * self.max_match} (twice max_match)"
            )
