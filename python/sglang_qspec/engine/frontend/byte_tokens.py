"""Decodes byte tokens so that an incomplete character does not change the characters before it.

Tokenizers of SentencePiece's kind have a token for each byte, `<0x00>` to `<0xFF>`, for characters
outside the vocabulary. They decode a run of byte tokens as a whole: if the run ends amid a
character, they replace every byte of the run by U+FFFD, complete characters too. So the text of an
output would depend on the steps in which it was decoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

_INVALID = re.compile("[\udc80-\udcff]")
"""What Python's `surrogateescape` makes of a byte that is no part of a character."""


class ByteTokens:
    """The byte tokens of a vocabulary."""

    def __init__(self, ids: Sequence[int]) -> None:
        """`ids` has the token id of each byte."""
        self._ids = ids
        self._bytes = {token_id: byte for byte, token_id in enumerate(ids)}

    def repaired(self, ids: Sequence[int]) -> Sequence[int]:
        """`ids` with the byte tokens of U+FFFD for each byte that is no part of a character."""
        if self._bytes.keys().isdisjoint(ids):
            return ids
        repaired: list[int] = []
        for in_bytes, run in groupby(ids, self._bytes.__contains__):
            if in_bytes:
                text = bytes(map(self._bytes.__getitem__, run)).decode("utf-8", "surrogateescape")
                run = map(self._ids.__getitem__, _INVALID.sub("\ufffd", text).encode())
            repaired += run
        return repaired


def repair(tokenizer: Any) -> None:
    """Let a tokenizer with byte tokens decode them by whole characters, also in lists of lists."""
    tokens = _byte_tokens(tokenizer)
    if tokens is None:
        return
    decode = tokenizer.decode

    def decode_repaired(token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(ids, list) for ids in token_ids):
            return decode([tokens.repaired(ids) for ids in token_ids], *args, **kwargs)
        return decode(tokens.repaired(token_ids), *args, **kwargs)

    tokenizer.decode = decode_repaired


def _byte_tokens(tokenizer: Any) -> ByteTokens | None:
    """The byte tokens of a tokenizer; None if it has none, or decodes them one by one."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    # A tokenizer without a token for what is unknown gives no id.
    if None in ids or tokenizer.convert_ids_to_tokens(ids) != names:
        return None
    letter = [ids[byte] for byte in "é".encode()]
    return ByteTokens(ids) if tokenizer.decode(letter) == "é" else None
