"""The tokens of all streams of one request, in flat arrays, and the index that finds them again.

A stream is a chain of nodes, one per token, and several chains may grow in turn. Nodes are
numbered from 1 in the order in which they came; 0 stands for no node. Every (token, next token)
pair leads to its occurrences, newest first, through a dictionary to the newest one and a link from
each to the one before: appending a token and finding an occurrence are both O(1). Single tokens
are indexed in the same way. All links are int32 arrays, ready to be handed to compiled code.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

Index = dict[int, int]
"""From a key (`pair_key`, or a token alone) to the newest node that completes it."""

NO_NODE = 0


def pair_key(first: int, second: int) -> int:
    """The key of two consecutive tokens; never equal to a single token."""
    return (first + 1) << 32 | second


class TokenArena:
    """Nodes only ever come; to drop some, what stays is copied to a new arena."""

    def __init__(self) -> None:
        self.token = array("i", [0])
        self.next = array("i", [NO_NODE])
        self.prev = array("i", [NO_NODE])
        self.stream = array("i", [0])
        """Number of the stream that the node belongs to."""
        self.older_pair = array("i", [NO_NODE])
        """The occurrence of the same pair, in the same index, before this one."""
        self.older_single = array("i", [NO_NODE])

    def __len__(self) -> int:
        return len(self.token) - 1

    def begin(self, token: int, stream: int) -> int:
        """Add a node that starts a chain. It is context only: not indexed itself."""
        return self._link(token, NO_NODE, stream, NO_NODE, NO_NODE)

    def extend(self, last: int, token_ids: Iterable[int], stream: int, index: Index) -> int:
        """Append tokens to the chain that ends in `last`; the chain's new last node."""
        before = self.token[last]
        for token in token_ids:
            key = pair_key(before, token)
            node = self._link(token, last, stream, index.get(key, 0), index.get(token, 0))
            self.next[last] = node
            index[key] = index[token] = last = node
            before = token
        return last

    def _link(self, token: int, prev: int, stream: int, pair: int, single: int) -> int:
        node = len(self.token)
        self.token.append(token)
        self.next.append(NO_NODE)
        self.prev.append(prev)
        self.stream.append(stream)
        self.older_pair.append(pair)
        self.older_single.append(single)
        return node

    def match_length(self, node: int, other: int, cap: int) -> int:
        """How many tokens, up to `cap`, are equal going back from two nodes."""
        token, prev = self.token, self.prev
        length = 0
        while length < cap and node and other and token[node] == token[other]:
            length += 1
            node, other = prev[node], prev[other]
        return length

    def chain(self, first: int) -> Iterator[int]:
        """The nodes of a chain from `first` on."""
        node = first
        while node:
            yield node
            node = self.next[node]

    def check_integrity(self, indexes: Iterable[Index]) -> None:
        """Raise RuntimeError where links or indexes contradict each other."""
        arrays = (self.next, self.prev, self.stream, self.older_pair, self.older_single)
        if any(len(values) != len(self.token) for values in arrays):
            raise RuntimeError("the arrays of an arena have different lengths")
        for node in range(1, len(self.token)):
            after, before = self.next[node], self.prev[node]
            if (after and self.prev[after] != node) or (before and self.next[before] != node):
                raise RuntimeError(f"node {node} is linked one way only")
            older = self.older_pair[node]
            if older and (older >= node or self._pair(older) != self._pair(node)):
                raise RuntimeError(f"node {node} has {older} as an older occurrence of its pair")
            older = self.older_single[node]
            if older and (older >= node or self.token[older] != self.token[node]):
                raise RuntimeError(f"node {node} has {older} as an older occurrence of its token")
        for index in indexes:
            for key, node in index.items():
                if key not in (self._pair(node), self.token[node]):
                    raise RuntimeError(f"the index leads from {key} to node {node}")

    def _pair(self, node: int) -> int:
        return pair_key(self.token[self.prev[node]], self.token[node])
