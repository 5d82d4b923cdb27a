"""Digest of a tokenizer; tokenizers with equal digests give each token id the same text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sglang_qspec.errors import LinkError


def fingerprint(vocabulary: Mapping[str, int], added: Mapping[str, int] | None = None) -> str:
    """Digest of the text of each token id, as 64 hexadecimal digits.

    `vocabulary` maps tokens to ids; `added` maps added and special tokens, for tokenizers that
    keep them apart (a token in both must have one id). Order does not matter. Ids without a token,
    which pad model vocabularies, do not count. Neither do merges and normalizers: they affect how
    text becomes ids, not the text of an id.

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
