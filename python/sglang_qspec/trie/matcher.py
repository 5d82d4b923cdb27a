"""Where the committed text occurs in a request's streams, followed token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_qspec.trie.arena import Index, TokenArena, pair_key
from sglang_qspec.trie.limits import TrieLimits


class Matcher:
    """The places (cursors) where the last committed tokens occur earlier.

    `lengths` maps each place, the node of the last committed token's earlier occurrence, to the
    length of the match that ends there. These are all occurrences of the last two tokens, within
    the caps; where there is none, the newest ones of the last token alone. A commit moves the
    cursors whose stream goes on as committed, drops the others, and adds new occurrences, so its
    cost does not grow with the text or with the length of a match.
    """

    def __init__(self, limits: TrieLimits) -> None:
        self.lengths: dict[int, int] = {}
        self._limits = limits

    def advance(self, arena: TokenArena, token_ids: Sequence[int]) -> None:
        """Follow committed tokens in the streams."""
        lengths, cap = self.lengths, self._limits.max_match
        following, token_of = arena.next, arena.token
        for token in token_ids:
            if not lengths:
                break
            lengths = {
                child: length + 1 if length < cap else cap
                for node, length in lengths.items()
                if (child := following[node]) and token_of[child] == token
            }
        self.lengths = lengths

    def discover(self, arena: TokenArena, tail: int, drafts: Index) -> None:
        """Add the occurrences of the text that ends in node `tail`, which is in the text's index.

        To be called after the last of the committed tokens.
        """
        limits, lengths = self._limits, self.lengths
        token = arena.token[tail]
        before = arena.prev[tail]
        if before:
            newest = drafts.get(pair_key(arena.token[before], token), 0)
            for node in (newest, arena.older_pair[tail]):
                for _ in range(limits.max_scan):
                    if not node:
                        break
                    if node not in lengths:
                        lengths[node] = arena.match_length(node, tail, limits.max_match)
                    node = arena.older_pair[node]
        if not lengths:
            for node in (drafts.get(token, 0), arena.older_single[tail]):
                for _ in range(limits.max_scan):
                    if not node:
                        break
                    lengths[node] = 1
                    node = arena.older_single[node]
        if len(lengths) > limits.max_cursors:
            best = sorted(lengths.items(), key=lambda item: (item[1], item[0]), reverse=True)
            self.lengths = dict(best[: limits.max_cursors])

    def notice(self, arena: TokenArena, tail: int, node: int) -> None:
        """Take up `node`, just appended to a stream, if the text's last two tokens end there."""
        if arena.token[node] != arena.token[tail] or len(self.lengths) >= self._limits.max_cursors:
            return
        length = arena.match_length(node, tail, self._limits.max_match)
        if length >= 2:
            if max(self.lengths.values(), default=2) == 1:
                self.lengths.clear()
            self.lengths[node] = length

    def move(self, arena: TokenArena, tail: int, moved: Mapping[int, int]) -> None:
        """Go on in a new arena, where nodes have the numbers in `moved` or are gone."""
        lengths: dict[int, int] = {}
        for node, length in self.lengths.items():
            if node in moved:
                left = arena.match_length(moved[node], tail, self._limits.max_match)
                if left >= min(2, length):
                    lengths[moved[node]] = left
        self.lengths = lengths

    def check_integrity(self, arena: TokenArena, tail: int) -> None:
        """Raise RuntimeError where a cursor is not at an occurrence of the committed text."""
        if len(self.lengths) > self._limits.max_cursors:
            raise RuntimeError(f"{len(self.lengths)} cursors are more than allowed")
        for node, length in self.lengths.items():
            if node == tail or not 1 <= length <= self._limits.max_match:
                raise RuntimeError(f"a cursor at node {node} has length {length}")
            if arena.match_length(node, tail, length) != length:
                raise RuntimeError(f"the cursor at node {node} has matched less than {length}")
