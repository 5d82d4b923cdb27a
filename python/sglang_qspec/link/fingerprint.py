"""Compares tokenizers by the text of each token id.

Ids without a token, which pad the vocabularies of models, do not count. Neither do merges and
normalizers: they affect how text becomes ids, not the text of an id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sglang_qspec.errors import LinkError


def fingerprint(vocabulary: Mapping[str, int], added: Mapping[str, int] | None = None) -> str:
    """Digest of the text of each token id, as 64 hexadecimal digits.

    `vocabulary` maps tokens to ids; `added` maps added and special tokens, for tokenizers that
    keep them apart (a token in both must have one id). Order does not matter.

    Raises LinkError if the vocabulary is empty, a token has two ids, or an id is negative.
    """
    tokens = dict(vocabulary)
    for token, token_id in (added or {}).items():
        if tokens.setdefault(token, token_id) != token_id:
            raise LinkError(f"token {token!r} has the ids {tokens[token]} and {token_id}")
    if not tokens:
        raise LinkError("the vocabulary is empty, so tokenizers cannot be compared")
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in tokens.items()):
        if token_id < 0:
            raise LinkError(f"token {token!r} has the id {token_id}, but ids start at 0")
        text = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (token_id, len(text)))
        digest.update(text)
    return digest.hexdigest()


def first_difference(vocabulary: Mapping[str, int], other: Mapping[str, int]) -> int | None:
    """The lowest token id that has different texts in the two vocabularies; None if they are equal.

    Both map tokens to ids. An id that only one of them has is a difference.
    """
    differing = set(vocabulary.items()) ^ set(other.items())
    return min((token_id for _, token_id in differing), default=None)
