"""Guesses of the next tokens of requests that the target itself improves, pass by pass.

A pass verifies a guessed continuation beside the other drafts. Each row of it gives the target's
token behind a guessed token, which is the guess for the next position in the next pass. This is the
Jacobi iteration of Santilli et al. 2023 (arXiv 2305.10427); earlier guesses stay in the trie, where
a match of the last tokens finds them, as the n-grams of lookahead decoding (Fu et al. 2024, arXiv
2402.02057). The target accepts a guess only if it is its own token, so the output does not change.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie import DraftTrees, Source, TrieStore

STRIDE = 7919
"""Distance in the prompt of the first guesses of two positions; a prime, so that they differ."""


class Jacobi:
    """Owns the guesses of all requests that have them."""

    def __init__(self, length: int, tries: TrieStore) -> None:
        """Guess `length` tokens at a time. `tries` has an open trie for each request."""
        self._length, self._tries = length, tries
        self._requests: dict[str, _Guesses] = {}

    @property
    def requests(self) -> Set[str]:
        """The ids of the requests."""
        return self._requests.keys()

    def begin(self, rid: str, serial: int, prompt_ids: Sequence[int]) -> None:
        """Begin to guess for a request. `serial` is that of its trie.

        The first guesses are tokens of its prompt.
        """
        self._requests[rid] = _Guesses(serial, prompt_ids, self._tries.limits.vocab_size)

    def end(self, rid: str) -> None:
        """Forget a request, if it has guesses."""
        self._requests.pop(rid, None)

    def window(self, rid: str, output_len: int) -> list[int]:
        """The guesses of the tokens behind `output_len` tokens of output; empty if it has none."""
        guesses = self._requests.get(rid)
        return [] if guesses is None else guesses.window(output_len, self._length)

    def draft(self, rid: str, output_len: int) -> None:
        """Insert the guesses into the request's trie; earlier ones stay, and may be found."""
        guesses = self._requests.get(rid)
        if guesses is not None:
            tokens = guesses.window(output_len, self._length)
            improved = output_len in guesses.known
            self._tries.insert(
                rid, guesses.serial, Source.JACOBI, 0, output_len, 0, tokens, greedy=improved
            )

    def improve(
        self,
        rids: Sequence[str],
        output_lens: Sequence[int],
        trees: DraftTrees,
        targets: NDArray[np.int32],
    ) -> None:
        """Improve the guesses by a pass over `trees`.

        `output_lens` are the lengths of the outputs before the pass, and `targets` int32 has the
        target's token behind each row of the pass.
        """
        places = zip(trees.starts.tolist(), trees.sizes.tolist(), strict=True)
        for row, (begin, size) in enumerate(places):
            guesses = self._requests.get(rids[row])
            if guesses is not None:
                guesses.improve(
                    output_lens[row],
                    trees.token_ids[row, :size].tolist(),
                    trees.parents[row, :size].tolist(),
                    targets[begin : begin + size].tolist(),
                )


class _Guesses:
    """The guesses of one request, by position in its output."""

    def __init__(self, serial: int, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.serial = serial
        self._prompt_ids, self._vocab_size = prompt_ids, vocab_size
        self.known: dict[int, int] = {}
        """The target's tokens behind guesses."""

    def window(self, output_len: int, length: int) -> list[int]:
        self.known = {place: token for place, token in self.known.items() if place >= output_len}
        return [self._guess(place) for place in range(output_len, output_len + length)]

    def _guess(self, place: int) -> int:
        if place in self.known:
            return self.known[place]
        token = self._prompt_ids[place * STRIDE % len(self._prompt_ids)]
        return token if 0 <= token < self._vocab_size else 0

    def improve(
        self,
        output_len: int,
        token_ids: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Walk along the guesses in the tree, and take the target's token behind each of them."""
        children = {(parents[node], token_ids[node]): node for node in range(1, len(token_ids))}
        found: dict[int, int] = {}
        node: int | None = 0
        place = output_len
        while node is not None:
            found[place] = targets[node]
            node = children.get((node, self._guess(place)))
            place += 1
        self.known |= found
