"""Cuts streamed text into stretches of one source each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""Decodes several lists of token ids."""

INCOMPLETE = "\ufffd"
"""The text that a tokenizer decodes from the bytes of an incomplete character."""


class Stretch(NamedTuple):
    """A piece of text from one `source`: a draft source, or `target`."""

    source: str
    text: str


class Stretches:
    """Cuts a growing answer into stretches.

    A token's text is the text that it adds to all tokens before it, so a character of several
    tokens belongs to the last one. The concatenated stretches are always the answer's text.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens = 0
        """Number of tokens with text already returned."""
        self._shown = 0
        """Number of characters already returned."""

    def take(
        self, text: str, output_ids: Sequence[int], provenance: Sequence[str]
    ) -> Iterator[Stretch]:
        """The new stretches of an answer; its text may lag behind its tokens.

        `provenance` has the source of each token of `output_ids`.
        """
        ends = self._ends(provenance)
        if not ends:
            return
        prefixes = [
            part.rstrip(INCOMPLETE) for part in self._decode([output_ids[:e] for e in ends])
        ]
        # Some tokenizers drop a space at the start of a text.
        lead = int(text[:1] == " " and prefixes[-1][:1] not in (" ", ""))
        for end, prefix in zip(ends, prefixes, strict=True):
            upto = max(self._shown, len(prefix) + lead)
            yield from self._show(text[:upto], provenance[end - 1])
            if upto > len(text):
                return
            self._tokens = end

    def finish(self, text: str, provenance: Sequence[str]) -> Iterator[Stretch]:
        """The rest of a complete answer."""
        yield from self._show(text, provenance[-1] if provenance else "target")

    def _ends(self, provenance: Sequence[str]) -> list[int]:
        """The ends of the runs of one source, as token counts, from the first new token on."""
        ends, end = [], self._tokens
        for _, run in groupby(provenance[self._tokens :]):
            end += len(list(run))
            ends.append(end)
        return ends

    def _show(self, text: str, source: str) -> Iterator[Stretch]:
        fresh = text[self._shown :]
        self._shown += len(fresh)
        if fresh:
            yield Stretch(source, fresh)
