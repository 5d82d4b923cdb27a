"""Streamed text in stretches, each with the word for whose its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The texts of several lists of token ids."""

INCOMPLETE = "\ufffd"
"""What a tokenizer gives for the bytes of a character that is not complete yet."""


class Stretch(NamedTuple):
    """A piece of text, and whose it is: `target`, or the source of a draft."""

    whose: str
    text: str


class Stretches:
    """Cuts an answer that grows into stretches.

    A token's text is what it adds to that of all tokens before it, so a character of several tokens
    belongs to the last of them. The stretches together are the answer's text, whatever happens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens = 0
        """Tokens whose text is out."""
        self._shown = 0
        """Characters that are out."""

    def take(self, text: str, output_ids: Sequence[int], whose: Sequence[str]) -> Iterator[Stretch]:
        """What is new in an answer, of which the text may lag behind its tokens.

        `whose` has a word for each of `output_ids`.
        """
        ends = self._ends(whose)
        if not ends:
            return
        prefixes = [
            part.rstrip(INCOMPLETE) for part in self._decode([output_ids[:e] for e in ends])
        ]
        # Some tokenizers drop the space that a text begins with.
        lead = int(text[:1] == " " and prefixes[-1][:1] not in (" ", ""))
        for end, prefix in zip(ends, prefixes, strict=True):
            upto = max(self._shown, len(prefix) + lead)
            yield from self._show(text[:upto], whose[end - 1])
            if upto > len(text):
                return
            self._tokens = end

    def finish(self, text: str, whose: Sequence[str]) -> Iterator[Stretch]:
        """What is left of a complete answer."""
        yield from self._show(text, whose[-1] if whose else "target")

    def _ends(self, whose: Sequence[str]) -> list[int]:
        """Where runs of equal words end, as numbers of tokens, of those that are not out."""
        ends, end = [], self._tokens
        for _, run in groupby(whose[self._tokens :]):
            end += len(list(run))
            ends.append(end)
        return ends

    def _show(self, text: str, whose: str) -> Iterator[Stretch]:
        fresh = text[self._shown :]
        self._shown += len(fresh)
        if fresh:
            yield Stretch(whose, fresh)
