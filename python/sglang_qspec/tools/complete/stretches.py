"""Cuts streamed text into stretches of one source each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from sglang_qspec.tools.complete.token_texts import Decode, TokenTexts


class Stretch(NamedTuple):
    """A piece of text from one `source`: a draft source, or `target`."""

    source: str
    text: str


class Stretches:
    """Cuts a growing answer into stretches. The concatenated stretches are the answer's text."""

    def __init__(self, decode: Decode) -> None:
        self._texts = TokenTexts(decode)

    def take(
        self, text: str, output_ids: Sequence[int], provenance: Sequence[str]
    ) -> Iterator[Stretch]:
        """The new stretches of an answer; its text may lag behind its tokens.

        `provenance` has the source of each token of `output_ids`.
        """
        first = self._texts.tokens
        texts = self._texts.take(text, output_ids)
        named = zip(provenance[first:], texts, strict=False)
        for source, run in groupby(named, key=lambda pair: pair[0]):
            joined = "".join(part for _, part in run)
            if joined:
                yield Stretch(source, joined)

    def finish(self, text: str, provenance: Sequence[str]) -> Iterator[Stretch]:
        """The rest of a complete answer."""
        rest = self._texts.finish(text)
        if rest:
            yield Stretch(provenance[-1] if provenance else "target", rest)
