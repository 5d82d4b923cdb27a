"""Guesses that a client sends with a request.

A client encloses a guess in the text in `<NGRAMGUESS>...</NGRAMGUESS>`; `split` removes tags and
guesses from the text. Or it sends guesses as keys of the sampling parameters' `custom_params`:

- `qspec_guesses`: a string, or a list of strings. With this key, tags in the text are literal.
- `qspec_guess_ids`: token ids, one flat list with None (null in JSON) between guesses, because
  SGLang allows no nested lists in `custom_params`. If a client can send a list of lists, QSPEC
  accepts and flattens it.

The limits count guesses and tokens as the client sent them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_qspec.errors import ConfigError, GuessError, shown

OPEN_TAG = "<NGRAMGUESS>"
CLOSE_TAG = "</NGRAMGUESS>"
GUESSES_KEY = "qspec_guesses"
GUESS_IDS_KEY = "qspec_guess_ids"
GUESS_KEYS = (GUESSES_KEY, GUESS_IDS_KEY)
"""Keys of `custom_params` that hold guesses."""

_TAG = re.compile("</?NGRAMGUESS>")


@dataclass(frozen=True)
class GuessLimits:
    """Limits on the guesses of one request, as the client sends them.

    `trie.limits` limits the draft tokens that are kept.
    """

    max_guesses: int = 64
    """Maximum number of guesses."""
    max_tokens: int = 4096
    """Maximum number of tokens in all guesses."""
    max_chars_per_token: int = 32
    """Characters per token of `max_tokens`. Longer text is refused before it is tokenized."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1")

    @property
    def max_chars(self) -> int:
        """Maximum number of characters in all guesses."""
        return self.max_tokens * self.max_chars_per_token

    def check_number(self, number: int) -> None:
        """Raise GuessError if `number` guesses are too many for one request."""
        if number > self.max_guesses:
            raise GuessError(f"there are {number} guesses; at most {self.max_guesses} are allowed")

    def check_texts(self, guesses: Sequence[str]) -> None:
        """Raise GuessError if one request's guesses are too many or have too many characters."""
        self.check_number(len(guesses))
        chars = sum(map(len, guesses))
        if chars > self.max_chars:
            raise GuessError(
                f"the guesses have {chars} characters together; "
                f"at most {self.max_chars} are allowed"
            )

    def check_tokens(self, tokens: int) -> None:
        """Raise GuessError if all guesses of one request have too many tokens."""
        if tokens > self.max_tokens:
            raise GuessError(
                f"the guesses have {tokens} tokens together; at most {self.max_tokens} are allowed"
            )


def split(text: str, limits: GuessLimits) -> tuple[str, list[str]]:
    """Return the text without tags and guesses, and the guesses in order of appearance.

    The other text does not change; white space next to a tag stays. Raises GuessError for unpaired
    or nested tags, a blank guess, guesses over a limit, and text that contains a tag after the
    guesses are removed.
    """
    if OPEN_TAG not in text and CLOSE_TAG not in text:
        return text, []
    kept: list[str] = []
    guesses: list[str] = []
    opened: int | None = None
    end = 0
    for tag in _TAG.finditer(text):
        here = tag.start()
        if tag.group() == OPEN_TAG:
            if opened is not None:
                raise GuessError(
                    f"{OPEN_TAG} at character {here} is inside the one at character {opened}; "
                    f"guesses must not nest"
                )
            opened = here
            kept.append(text[end:here])
        else:
            if opened is None:
                raise GuessError(
                    f"{CLOSE_TAG} at character {here} closes nothing; put {OPEN_TAG} before it"
                )
            guess = text[end:here]
            if not guess.strip():
                raise GuessError(
                    f"the guess at character {opened} is empty; it must hold some text"
                )
            guesses.append(guess)
            opened = None
        end = tag.end()
    if opened is not None:
        raise GuessError(
            f"{OPEN_TAG} at character {opened} is never closed; end it with {CLOSE_TAG}"
        )
    kept.append(text[end:])
    limits.check_texts(guesses)
    rest = "".join(kept)
    formed = _TAG.search(rest)
    if formed is not None:
        raise GuessError(
            f"without its guesses the text has {formed.group()} at character {formed.start()}; "
            f"no tag may remain: change the text, or send the guesses as {GUESSES_KEY} in "
            f"custom_params"
        )
    return rest, guesses


def read_guess_texts(value: object) -> list[str]:
    """Read the guesses in the value of `qspec_guesses`.

    An empty list is allowed. Raises GuessError unless `value` is a string or a list of strings,
    none of them blank.
    """
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise GuessError(
            f"{GUESSES_KEY} is {shown(value)}, but must be a string or a list of strings"
        )
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise GuessError(
                f"guess {number} in {GUESSES_KEY} is {shown(item)}, but must be a string"
            )
        if not item.strip():
            raise GuessError(f"guess {number} in {GUESSES_KEY} is empty; it must hold some text")
    return list(items)


def read_guess_ids(value: object, vocab_size: int) -> list[list[int]]:
    """Read the guesses in the value of `qspec_guess_ids`, each a list of token ids.

    `value` is a list of lists of token ids, or one flat list with None between the guesses.
    Raises GuessError for any other value, for an empty guess, and for a token id that is not below
    `vocab_size`.
    """
    if not isinstance(value, list | tuple) or not value:
        raise GuessError(
            f"{GUESS_IDS_KEY} is {shown(value)}, but must be a list of token ids with null "
            f"between guesses, or a list of such lists"
        )
    nested = all(isinstance(item, list | tuple) for item in value)
    groups: list[list[object]] = [list(item) for item in value] if nested else _divide(value)
    guesses: list[list[int]] = []
    for number, group in enumerate(groups):
        if not group:
            raise GuessError(f"guess {number} in {GUESS_IDS_KEY} is empty")
        guess: list[int] = []
        for item in group:
            # isinstance would accept a bool as an int.
            if type(item) is not int or not 0 <= item < vocab_size:
                raise GuessError(
                    f"guess {number} in {GUESS_IDS_KEY} holds {shown(item)}, but a token id must "
                    f"be a whole number from 0 to {vocab_size - 1}"
                )
            guess.append(item)
        guesses.append(guess)
    return guesses


def flatten(guesses: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the flat form of guesses for `custom_params`, which `read_guess_ids` reads."""
    flat: list[int | None] = []
    for number, guess in enumerate(guesses):
        if number:
            flat.append(None)
        flat.extend(guess)
    return flat


def _divide(flat: Sequence[object]) -> list[list[object]]:
    groups: list[list[object]] = [[]]
    for item in flat:
        if item is None:
            groups.append([])
        else:
            groups[-1].append(item)
    return groups
