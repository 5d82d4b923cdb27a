"""Extends the pieces of a streamed answer to the whole answer so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sglang_qspec.errors import ClientError
from sglang_qspec.tools.complete import peers


def whole(pieces: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Extend each piece to the whole answer so far, if the server streams only new tokens.

    The piece then has all draft sources in `qspec_provenance`. Raises AnswerError if the pieces of
    one answer are too long together.
    """
    size = 0
    text: str = ""
    ids: list[int] = []
    provenance: list[str] = []
    for piece in pieces:
        meta = piece["meta_info"]
        if len(piece["output_ids"]) < meta["completion_tokens"]:
            size += len(json.dumps(piece))
            peers.check_size(size)
            piece["text"] = text + piece["text"]
            piece["output_ids"] = ids + piece["output_ids"]
            meta["qspec_provenance"] = provenance + meta.get("qspec_provenance", [])
        text, ids = piece["text"], piece["output_ids"]
        provenance = meta.get("qspec_provenance", provenance)
        yield piece


def end_of(piece: dict[str, Any]) -> str:
    """Why the answer ended with this piece, which is empty if no piece came.

    Raises ClientError if the server did not finish the answer.
    """
    reason = piece.get("meta_info", {}).get("finish_reason")
    if not isinstance(reason, dict):
        raise ClientError("the server ended the answer early; it may have stopped")
    if reason.get("type") == "abort":
        why = peers.message(str(reason.get("message", "no reason")))
        raise ClientError(f"the server aborted the request: {why}")
    return str(reason["type"])


def labels(piece: dict[str, Any]) -> list[str]:
    """The draft source of each token of a whole answer.

    A server sends no labels after its speculation has failed, because the target then decodes all
    tokens.
    """
    return piece["meta_info"].get("qspec_provenance") or ["target"] * len(piece["output_ids"])
