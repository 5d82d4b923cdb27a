"""A text that a client guesses, and how several of them fit the limits of a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_qspec.guess_tags import GUESSES_KEY, GuessLimits


@dataclass(frozen=True, slots=True)
class Guess:
    """A text that may be a part of an answer."""

    text: str
    tokens: int
    """Number of tokens of the text, or an upper bound; at least 1."""

    def cut(self, tokens: int) -> Guess:
        """The beginning of the guess, of at most a number of tokens."""
        if self.tokens <= tokens:
            return self
        return Guess(self.text[: len(self.text) * tokens // self.tokens], tokens)


def guess_of(text: str, tokens: int = 0) -> Guess:
    """A guess of `tokens` tokens; 0 means that their number is unknown.

    The number of characters then stands for it, which is rarely too small.
    """
    return Guess(text, tokens or max(1, len(text)))


def limits_in(state: Any) -> GuessLimits | None:
    """The limits in QSPEC's part of /server_info; None if the server reports none."""
    limits = state.get("guess_limits") if isinstance(state, dict) else None
    if not isinstance(limits, dict):
        return None
    guesses, tokens = limits.get("guesses"), limits.get("tokens")
    if not (isinstance(guesses, int) and isinstance(tokens, int) and min(guesses, tokens) > 0):
        return None
    return GuessLimits(guesses, tokens)


def fitted(guesses: Iterable[Guess], limits: GuessLimits) -> list[str]:
    """The texts of the guesses that a server with these limits takes.

    The last ones are cut or left out. So are blank texts, and those with which another one begins.
    """
    found: list[str] = []
    left = limits.max_tokens
    for guess in guesses:
        text = guess.cut(left).text[: limits.max_chars - sum(map(len, found))]
        if not text.strip() or any(each.startswith(text) for each in found):
            continue
        if len(found) == limits.max_guesses or left < 1:
            break
        found.append(text)
        left -= guess.tokens
    return found


def joined(custom_params: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The `custom_params` of a request with more guesses after its own.

    A value that is no guess stays alone, so that the server can refuse it.
    """
    own = custom_params.get(GUESSES_KEY, [])
    own = [own] if isinstance(own, str) else own
    if not isinstance(own, list) or not texts:
        return custom_params
    return {**custom_params, GUESSES_KEY: [*own, *texts]}
