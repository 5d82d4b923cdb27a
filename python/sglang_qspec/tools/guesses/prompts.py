"""Finds the earlier prompt that equals a prompt, or shares most of its rare pairs of words with it.

A prompt is known by the pairs of neighbouring words that few prompts have. The index keeps the
`KEPT` pairs with the smallest hashes: a bottom-k sketch (Broder, "On the resemblance and
containment of documents", 1997), which two similar prompts share in proportion to their
resemblance. Pairs that many prompts have, such as those of a common instruction, tell nothing.
Counters leave them out, so a long template does not hide what differs behind it.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.tools.guesses.postings import HASH_BITS, Postings, hash_of

KEPT = 16
"""Pairs that the index keeps of a prompt. They take 8 bytes each."""
ASKED = 128
"""Pairs of a prompt that are looked up."""
COMMON = 32
"""Number of prompts from which on a pair tells nothing."""
SIMILAR = 0.3
"""Share of the kept pairs that a similar prompt must have. A tenth of the words changes a fifth of
the pairs, and two thirds of all pairs of both prompts then stay common."""
END = 4096
"""Characters of a prompt that are read at its beginning and at its end."""
COUNTERS = 1 << 26
"""Number of counters of one byte, which pairs share. A million prompts of 60 words fill them."""
_WORD = re.compile(rb"[\w\x80-\xff]{1,8}")
"""A word, or a part of a long one or of a text without spaces."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


class PromptIndex:
    """Numbers of answers by their prompts. A million prompts take about 200 MB."""

    def __init__(self) -> None:
        self._equal = Postings()
        self._pairs = Postings()
        self._counters = np.zeros(COUNTERS, np.uint8)
        """How many prompts have a pair, at most 255."""

    def add(self, prompt: str, number: int) -> None:
        """Add the prompt of an answer."""
        self._equal.add(hash_of(prompt), number)
        pairs = _pairs_of(prompt)
        places = pairs % COUNTERS
        counts = self._counters[places]
        self._counters[places] = np.minimum(counts, 254) + 1
        self._pairs.add(pairs[counts < COMMON][:KEPT], number)

    def find(self, prompt: str) -> int | None:
        """The newest answer to an equal prompt, or the answer to the most similar one, if any."""
        equal = self._equal.find(hash_of(prompt))
        if len(equal):
            return int(equal[-1])
        pairs = _pairs_of(prompt)
        pairs = pairs[self._counters[pairs % COUNTERS] <= COMMON]
        found, counts = np.unique(self._pairs.find(pairs[:ASKED]), return_counts=True)
        if not len(found) or counts.max() < SIMILAR * min(KEPT, len(pairs)):
            return None
        return int(found[counts.argmax()])


def _pairs_of(prompt: str) -> NDArray[np.uint64]:
    """Hashes of the different pairs of neighbouring words, in rising order: uint64 [n]."""
    text = prompt if len(prompt) <= 2 * END else f"{prompt[:END]} {prompt[-END:]}"
    words = _WORD.findall(text.lower().encode("utf-8", "surrogatepass"))
    ids = np.array([0, *map(zlib.crc32, words)], np.uint64)
    mixed = (ids[:-1] * _MIX + ids[1:]) * _MIX
    return np.unique(mixed >> np.uint64(64 - HASH_BITS))
