"""Encodes and decodes messages, and rejects malformed ones.

Peers are not trusted. msgspec checks the types and the bounds that `messages` states. This module
checks token ids against the vocabulary, and fields that depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_qspec.errors import LinkError
from sglang_qspec.messages import (
    MAX_COMMITS,
    MAX_FROM_SIDECAR_BYTES,
    MIN_TEMPERATURE,
    Candidates,
    Commit,
    Commits,
    Drafted,
    FromSidecar,
    Submit,
    ToSidecar,
)

MAX_ROUNDING = 1e-3
"""Maximum deviation of the sum of probabilities from 1; the server divides them by the sum."""

_encoder = msgspec.msgpack.Encoder()
_from_sidecar = msgspec.msgpack.Decoder(FromSidecar)
_to_sidecar = msgspec.msgpack.Decoder(ToSidecar)
_commit = msgspec.msgpack.Decoder(Commit)

_CANNOT_ENCODE = (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError)
"""UnicodeError: a text has a lone surrogate, which JSON allows."""
_CANNOT_DECODE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""RecursionError: a field outside the schema has deeply nested data."""


class _Entries(msgspec.Struct, frozen=True, tag="commits"):
    """`Commits` with entries that are not decoded yet."""

    requests: Annotated[list[msgspec.Raw], Meta(max_length=MAX_COMMITS)]


class _Tag(msgspec.Struct, frozen=True):
    """The tag of any message, which may be malformed otherwise."""

    type: Annotated[str, Meta(max_length=16)]


_entries = msgspec.msgpack.Decoder(_Entries)
_tag = msgspec.msgpack.Decoder(_Tag)

Report = Callable[[LinkError], None]
"""Called for each entry of a message that violates the protocol."""


def encode(message: ToSidecar | FromSidecar, max_bytes: int = MAX_FROM_SIDECAR_BYTES) -> bytes:
    """Encode a message as one frame.

    Raises LinkError if the message cannot be encoded or takes more than `max_bytes`.
    """
    try:
        frame = _encoder.encode(message)
    except _CANNOT_ENCODE as error:
        raise LinkError(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(frame) > max_bytes:
        raise LinkError(
            f"{type(message).__name__} takes {len(frame)} bytes, but at most {max_bytes} are "
            "allowed"
        )
    return frame


def decode_from_sidecar(frame: bytes, vocab_size: int) -> FromSidecar:
    """Decode and check a message from a sidecar.

    Raises LinkError if it violates the protocol.
    """
    _check_size(frame, MAX_FROM_SIDECAR_BYTES)
    try:
        message: FromSidecar = _from_sidecar.decode(frame)
    except _CANNOT_DECODE as error:
        raise _malformed("a sidecar", frame, error) from None
    if isinstance(message, Drafted):
        _check_token_ids("Drafted.token_ids", message.token_ids, vocab_size)
        if message.candidates:
            _check_candidates(message, vocab_size)
        if message.second_ids:
            _check_length("Drafted.second_ids", message.second_ids, message)
            _check_token_ids("Drafted.second_ids", message.second_ids, vocab_size)
    return message


def decode_to_sidecar(frame: bytes, vocab_size: int, report: Report, max_bytes: int) -> ToSidecar:
    """Decode and check a message from a server, in a frame of at most `max_bytes`.

    Drops each entry of `Commits` that violates the protocol, and passes its error to `report`.
    Raises LinkError if the message as a whole violates the protocol.
    """
    _check_size(frame, max_bytes)
    try:
        message: ToSidecar = _to_sidecar.decode(frame)
    except _CANNOT_DECODE as error:
        message = _entry_by_entry(frame, report, error)
    if isinstance(message, Submit):
        _check_submit(message, vocab_size)
    elif isinstance(message, Commits):
        return _allowed_commits(message.requests, vocab_size, report)
    return message


def _malformed(sender: str, frame: bytes, error: Exception) -> LinkError:
    """The error for a frame that cannot be decoded, with the tag of the message if it has one."""
    try:
        tag = f"{_tag.decode(frame).type}: "
    except _CANNOT_DECODE:
        tag = ""
    return LinkError(f"not a message from {sender}: {tag}{error}")


def _entry_by_entry(frame: bytes, report: Report, error: Exception) -> Commits:
    """Decode the entries of a malformed Commits one by one; raises LinkError for other messages."""
    try:
        entries = _entries.decode(frame).requests
    except _CANNOT_DECODE:
        raise _malformed("a server", frame, error) from None
    commits = []
    for entry in entries:
        try:
            commits.append(_commit.decode(entry))
        except _CANNOT_DECODE as wrong:
            report(LinkError(f"not a Commit: {wrong}"))
    return Commits(commits)


def _allowed_commits(commits: list[Commit], vocab_size: int, report: Report) -> Commits:
    """Return the entries with tokens of the vocabulary, and report the others."""
    allowed = []
    for commit in commits:
        try:
            _check_token_ids("Commit.token_ids", commit.token_ids, vocab_size)
        except LinkError as error:
            report(error)
        else:
            allowed.append(commit)
    return Commits(allowed)


def _check_submit(submit: Submit, vocab_size: int) -> None:
    _check_token_ids("Submit.token_ids", submit.token_ids, vocab_size)
    _check_token_ids("Submit.stop_token_ids", submit.stop_token_ids, vocab_size)
    if submit.base_len > len(submit.token_ids):
        raise LinkError(
            f"Submit.base_len is {submit.base_len}, but must be at most the number of "
            f"token_ids ({len(submit.token_ids)})"
        )
    if 0 < submit.temperature < MIN_TEMPERATURE:
        raise LinkError(
            f"Submit.temperature is {submit.temperature}, but must be 0 or at least "
            f"{MIN_TEMPERATURE}"
        )


def _check_length(name: str, values: Sequence[object], drafted: Drafted) -> None:
    if len(values) != len(drafted.token_ids):
        raise LinkError(
            f"{name} has the length {len(values)}, but must be empty or have the length of "
            f"Drafted.token_ids ({len(drafted.token_ids)})"
        )


def _check_candidates(drafted: Drafted, vocab_size: int) -> None:
    _check_length("Drafted.candidates", drafted.candidates, drafted)
    for token_id, candidates in zip(drafted.token_ids, drafted.candidates, strict=True):
        _check_candidates_of(token_id, candidates, vocab_size)


def _check_candidates_of(token_id: int, candidates: Candidates, vocab_size: int) -> None:
    token_ids, probs = candidates.token_ids, candidates.probs
    _check_token_ids("Candidates.token_ids", token_ids, vocab_size)
    if len(set(token_ids)) != len(token_ids) or token_id not in token_ids:
        raise LinkError(
            f"Candidates.token_ids is {token_ids}, but must contain the drafted token {token_id} "
            "and no token twice"
        )
    if len(probs) != len(token_ids):
        raise LinkError(
            f"Candidates.probs has the length {len(probs)}, but must have the length of "
            f"Candidates.token_ids ({len(token_ids)})"
        )
    if abs(sum(probs) - 1) > MAX_ROUNDING:
        raise LinkError(f"Candidates.probs sum to {sum(probs)}, but must sum to 1")


def _check_size(frame: bytes, max_bytes: int) -> None:
    if len(frame) > max_bytes:
        raise LinkError(f"a frame has {len(frame)} bytes, but may have at most {max_bytes}")


def _check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise LinkError(
            f"{field} has the token id {max(token_ids)}, but token ids must be from 0 to "
            f"{vocab_size - 1}"
        )
