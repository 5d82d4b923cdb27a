"""Draft tries: one per request, with insert, commit and propose, and a store that caps them all."""

from sglang_qspec.draft_source import Source
from sglang_qspec.trie._native import Trust
from sglang_qspec.trie.insertion import Insertion
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.request import RequestTrie
from sglang_qspec.trie.store import TrieStore
from sglang_qspec.trie.tree import DraftTree
from sglang_qspec.trie.trees import DraftTrees, TreeLayout

__all__ = [
    "DraftTree",
    "DraftTrees",
    "Insertion",
    "RequestTrie",
    "Source",
    "TreeLayout",
    "TrieLimits",
    "TrieStore",
    "Trust",
]
