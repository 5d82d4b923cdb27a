"""Messages to bytes and back; nothing malformed gets past here.

A peer is not believed: besides the types, which msgspec checks, the ranges are checked that the
rest of the package relies on.
"""

from __future__ import annotations

import math

import msgspec

from sglang_qspec.errors import LinkError
from sglang_qspec.messages import (
    MAX_CANDIDATES,
    MAX_MESSAGE_BYTES,
    Admit,
    Candidates,
    Close,
    Commits,
    Dice,
    Drafted,
    FromSidecar,
    Heartbeat,
    Hello,
    Ping,
    Refusal,
    Submit,
    ToSidecar,
    Welcome,
)

MAX_LENGTH = (1 << 31) - 1
"""Lengths and positions, in tokens, fit a signed 32-bit integer."""
MAX_COMMITS = 1024
"""Requests in one Commits, at most."""
MAX_STEP_TIMES = 64
"""Sizes of passes in one Heartbeat, at most."""
MAX_ROUNDING = 1e-3
"""By how much probabilities may miss the sum of 1; the server divides them by it."""
MAX_NAME_CHARS = 4096
"""A rid, a fingerprint or any other name is no longer than this."""

_encoder = msgspec.msgpack.Encoder()
_from_sidecar = msgspec.msgpack.Decoder(FromSidecar)
_to_sidecar = msgspec.msgpack.Decoder(ToSidecar)

_CANNOT_ENCODE = (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError)
"""A rid with a lone surrogate, which JSON allows, is a UnicodeError."""
_CANNOT_DECODE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Deeply nested data in a field that the schema does not have is a RecursionError."""


def encode(message: ToSidecar | FromSidecar) -> bytes:
    """One frame.

    Raises LinkError when the message cannot be encoded or is longer than MAX_MESSAGE_BYTES.
    """
    try:
        frame = _encoder.encode(message)
    except _CANNOT_ENCODE as error:
        raise LinkError(f"{type(message).__name__} cannot be encoded: {error}") from None
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LinkError(
            f"{type(message).__name__} takes {len(frame)} bytes, but at most {MAX_MESSAGE_BYTES} "
            "are allowed"
        )
    return frame


def decode_from_sidecar(frame: bytes, vocab_size: int) -> FromSidecar:
    """What the sidecar says. Raises LinkError when the protocol does not allow it."""
    _check_size(frame)
    try:
        message: FromSidecar = _from_sidecar.decode(frame)
    except _CANNOT_DECODE as error:
        raise LinkError(f"not a message from a sidecar: {error}") from None
    match message:
        case Drafted():
            _check_name("Drafted.rid", message.rid)
            _check_range("Drafted.serial", message.serial, 0)
            _check_length("Drafted.completion", message.completion)
            _check_length("Drafted.base_len", message.base_len)
            _check_length("Drafted.start", message.start)
            _check_length("Drafted.known_len", message.known_len)
            _check_token_ids("Drafted.token_ids", message.token_ids, vocab_size)
            if message.candidates:
                _check_candidates(message, vocab_size)
        case Welcome():
            _check_name("Welcome.model", message.model)
            _check_name("Welcome.session", message.session)
            _check_length("Welcome.vocab_size", message.vocab_size)
            _check_length("Welcome.context_len", message.context_len)
        case Refusal():
            _check_name("Refusal.reason", message.reason)
        case Heartbeat():
            _check_heartbeat(message)
    return message


def decode_to_sidecar(frame: bytes, vocab_size: int) -> ToSidecar:
    """What a server says. Raises LinkError when the protocol does not allow it."""
    _check_size(frame)
    try:
        message: ToSidecar = _to_sidecar.decode(frame)
    except _CANNOT_DECODE as error:
        raise LinkError(f"not a message from a server: {error}") from None
    match message:
        case Submit():
            _check_name("Submit.rid", message.rid)
            _check_range("Submit.serial", message.serial, 0)
            _check_length("Submit.base_len", message.base_len)
            _check_length("Submit.max_new_tokens", message.max_new_tokens)
            _check_length("Submit.completions", message.completions)
            _check_token_ids("Submit.token_ids", message.token_ids, vocab_size)
            _check_token_ids("Submit.stop_token_ids", message.stop_token_ids, vocab_size)
            if message.base_len > len(message.token_ids):
                raise LinkError(
                    f"Submit.base_len is {message.base_len}, but must be at most the number of "
                    f"token_ids ({len(message.token_ids)})"
                )
            if not (math.isfinite(message.temperature) and message.temperature >= 0):
                raise LinkError(
                    f"Submit.temperature is {message.temperature}, but must be at least 0"
                )
            _check_share("Submit.top_p", message.top_p)
            if message.dice is not None:
                _check_dice(message.dice)
        case Commits():
            _check_range("the length of Commits.requests", len(message.requests), 0, MAX_COMMITS)
            for commit in message.requests:
                _check_name("Commit.rid", commit.rid)
                _check_range("Commit.serial", commit.serial, 0)
                _check_length("Commit.base_len", commit.base_len)
                _check_length("Commit.max_new_tokens", commit.max_new_tokens)
                _check_token_ids("Commit.token_ids", commit.token_ids, vocab_size)
        case Admit() | Close():
            kind = type(message).__name__
            _check_name(f"{kind}.rid", message.rid)
            _check_range(f"{kind}.serial", message.serial, 0)
        case Hello():
            _check_name("Hello.fingerprint", message.fingerprint)
            _check_length("Hello.vocab_size", message.vocab_size)
        case Ping():
            _check_range("Ping.number", message.number, 0)
    return message


def _check_candidates(drafted: Drafted, vocab_size: int) -> None:
    if len(drafted.candidates) != len(drafted.token_ids):
        raise LinkError(
            f"Drafted.candidates are those of {len(drafted.candidates)} tokens, but must be those "
            f"of all {len(drafted.token_ids)} or of none"
        )
    for token_id, candidates in zip(drafted.token_ids, drafted.candidates, strict=True):
        _check_candidates_of(token_id, candidates, vocab_size)


def _check_candidates_of(token_id: int, candidates: Candidates, vocab_size: int) -> None:
    token_ids, probs = candidates.token_ids, candidates.probs
    _check_range("the length of Candidates.token_ids", len(token_ids), 1, MAX_CANDIDATES)
    _check_token_ids("Candidates.token_ids", token_ids, vocab_size)
    if len(set(token_ids)) != len(token_ids) or token_id not in token_ids:
        raise LinkError(
            f"Candidates.token_ids are {token_ids}, but must be different and have the drafted "
            f"token {token_id} among them"
        )
    if len(probs) != len(token_ids):
        raise LinkError(
            f"Candidates.probs has the length {len(probs)}, but must have that of "
            f"Candidates.token_ids ({len(token_ids)})"
        )
    total = sum(probs)
    # A NaN among them makes the total one, and no comparison with a NaN holds.
    if not (abs(total - 1) <= MAX_ROUNDING and min(probs) > 0 and max(probs) <= 1):
        raise LinkError(
            f"Candidates.probs are from {min(probs)} to {max(probs)} and sum to {total}, but must "
            "be over 0 and sum to 1"
        )


def _check_heartbeat(message: Heartbeat) -> None:
    for name in Heartbeat.__struct_fields__:
        if name != "step_times":
            _check_range(f"Heartbeat.{name}", getattr(message, name), 0)
    _check_range("the length of Heartbeat.step_times", len(message.step_times), 0, MAX_STEP_TIMES)
    for size, seconds in message.step_times:
        _check_range("a size in Heartbeat.step_times", size, 1)
        _check_range("a time in Heartbeat.step_times", seconds, 0)


def _check_dice(dice: Dice) -> None:
    _check_range("Dice.seed", dice.seed, -(1 << 63), (1 << 63) - 1)
    _check_range("Dice.top_k", dice.top_k, 1, MAX_LENGTH)
    _check_share("Dice.top_p", dice.top_p)
    _check_share("Dice.min_p", dice.min_p)
    if not (math.isfinite(dice.temperature) and dice.temperature > 0):
        raise LinkError(f"Dice.temperature is {dice.temperature}, but must be over 0")


def _check_size(frame: bytes) -> None:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LinkError(f"a frame of {len(frame)} bytes, but at most {MAX_MESSAGE_BYTES} are read")


def _check_range(field: str, value: float, low: int, high: int | None = None) -> None:
    if not low <= value < math.inf or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise LinkError(f"{field} is {value}, but must be {allowed}")


def _check_share(field: str, value: float) -> None:
    if not 0 <= value <= 1:  # nor is a NaN
        raise LinkError(f"{field} is {value}, but must be from 0 to 1")


def _check_length(field: str, value: int) -> None:
    _check_range(field, value, 0, MAX_LENGTH)


def _check_name(field: str, value: str) -> None:
    if len(value) > MAX_NAME_CHARS:
        raise LinkError(
            f"{field} has {len(value)} characters, but may have at most {MAX_NAME_CHARS}"
        )


def _check_token_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise LinkError(
            f"{field} spans {min(token_ids)} to {max(token_ids)}, but token ids must be from 0 to "
            f"{vocab_size - 1}"
        )
