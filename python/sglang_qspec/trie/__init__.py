"""One request's drafts: insert, commit, match, tree; caps and eviction over all requests."""

from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.request import RequestTrie
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.store import TrieStore
from sglang_qspec.trie.stream import Insertion
from sglang_qspec.trie.tree import DraftTree, PackedTrees, pack

__all__ = [
    "DraftTree",
    "Insertion",
    "PackedTrees",
    "RequestTrie",
    "Source",
    "TrieLimits",
    "TrieStore",
    "pack",
]
