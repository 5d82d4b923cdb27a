"""Extends the pieces of a streamed answer to the whole answer so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def whole(pieces: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Extend each piece to the whole answer so far, if the server streams only new tokens.

    The piece then has all draft sources in `qspec_provenance`.
    """
    text: str = ""
    ids: list[int] = []
    provenance: list[str] = []
    for piece in pieces:
        meta = piece["meta_info"]
        if len(piece["output_ids"]) < meta["completion_tokens"]:
            piece["text"] = text + piece["text"]
            piece["output_ids"] = ids + piece["output_ids"]
            meta["qspec_provenance"] = provenance + meta.get("qspec_provenance", [])
        text, ids = piece["text"], piece["output_ids"]
        provenance = meta.get("qspec_provenance", provenance)
        yield piece


def labels(piece: dict[str, Any]) -> list[str]:
    """The draft source of each token of a whole answer.

    A server sends no labels after its speculation has failed, because the target then decodes all
    tokens.
    """
    return piece["meta_info"].get("qspec_provenance") or ["target"] * len(piece["output_ids"])
