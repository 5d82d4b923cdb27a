"""Encodes and decodes messages, and rejects malformed ones.

Peers are not trusted. msgspec checks the types, and this module checks the ranges on which the rest
of the package relies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from sglang_qspec.errors import LinkError
from sglang_qspec.messages import (
    MAX_CANDIDATES,
    MAX_COMMIT_TOKENS,
    MAX_COMMITS,
    MAX_DRAFTED_TOKENS,
    MAX_DRAWN_TOKENS,
    MAX_FROM_SIDECAR_BYTES,
    MAX_LOOKAHEAD,
    MAX_STOP_TOKENS,
    MIN_TEMPERATURE,
    Admit,
    Candidates,
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    Heartbeat,
    Hello,
    Ping,
    Refusal,
    SeededSampling,
    Submit,
    ToSidecar,
    Welcome,
)

MAX_LENGTH = (1 << 31) - 1
"""Maximum of lengths and positions in tokens; it fits a signed 32-bit integer."""
MAX_NUMBER = (1 << 63) - 1
"""Maximum of submission numbers; it fits a signed 64-bit integer."""
MAX_STEP_TIMES = 64
"""Maximum number of pass sizes in one Heartbeat."""
MAX_ROUNDING = 1e-3
"""Maximum deviation of the sum of probabilities from 1; the server divides them by the sum."""
MAX_NAME_CHARS = 4096
"""Maximum length of a text in a message, such as a model name or a reason, in characters."""

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

    requests: list[msgspec.Raw]


_entries = msgspec.msgpack.Decoder(_Entries)

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
        raise LinkError(f"not a message from a sidecar: {error}") from None
    match message:
        case Drafted():
            _check_drafted(message, vocab_size)
        case Gap():
            _check_number("Gap.submission", message.submission)
            _check_length("Gap.known_len", message.known_len or 0)
        case Declined():
            _check_number("Declined.submission", message.submission)
            _check_text("Declined.reason", message.reason)
            _check_range("Declined.retry_after_s", message.retry_after_s, 0)
        case Welcome():
            _check_text("Welcome.model", message.model)
            _check_text("Welcome.session", message.session)
            _check_length("Welcome.vocab_size", message.vocab_size)
            _check_length("Welcome.context_len", message.context_len)
            _check_range("Welcome.max_text_tokens", message.max_text_tokens, 0)
        case Refusal():
            _check_text("Refusal.reason", message.reason)
        case Heartbeat():
            _check_heartbeat(message)
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
        return _entry_by_entry(frame, vocab_size, report, error)
    match message:
        case Submit():
            _check_submit(message, vocab_size)
        case Commits():
            return _allowed_commits(message.requests, vocab_size, report)
        case Admit() | Close():
            _check_number(f"{type(message).__name__}.submission", message.submission)
        case Hello():
            _check_text("Hello.fingerprint", message.fingerprint)
            # The sidecar could not sample from a vocabulary without tokens.
            _check_range("Hello.vocab_size", message.vocab_size, 1, MAX_LENGTH)
            _check_number("Hello.number", message.number)
        case Ping():
            _check_number("Ping.number", message.number)
    return message


def _entry_by_entry(frame: bytes, vocab_size: int, report: Report, error: Exception) -> Commits:
    """Decode the entries of a malformed Commits one by one; raises LinkError for other messages."""
    try:
        entries = _entries.decode(frame).requests
    except _CANNOT_DECODE:
        raise LinkError(f"not a message from a server: {error}") from None
    commits = []
    for entry in entries[:MAX_COMMITS]:
        try:
            commits.append(_commit.decode(entry))
        except _CANNOT_DECODE as wrong:
            report(LinkError(f"not a Commit: {wrong}"))
    return _allowed_commits(commits, vocab_size, report)


def _allowed_commits(commits: list[Commit], vocab_size: int, report: Report) -> Commits:
    """Return the entries that satisfy the protocol, and report the others."""
    _check_range("the length of Commits.requests", len(commits), 0, MAX_COMMITS)
    allowed = []
    for commit in commits:
        try:
            _check_commit(commit, vocab_size)
        except LinkError as error:
            report(error)
        else:
            allowed.append(commit)
    return Commits(allowed)


def _check_submit(submit: Submit, vocab_size: int) -> None:
    _check_number("Submit.submission", submit.submission)
    _check_length("Submit.base_len", submit.base_len)
    _check_length("Submit.max_new_tokens", submit.max_new_tokens)
    _check_length("Submit.completions", submit.completions)
    _check_number("Submit.scope", submit.scope)
    _check_range("the length of Submit.token_ids", len(submit.token_ids), 1)
    _check_token_ids("Submit.token_ids", submit.token_ids, vocab_size)
    _check_range(
        "the length of Submit.stop_token_ids", len(submit.stop_token_ids), 0, MAX_STOP_TOKENS
    )
    _check_token_ids("Submit.stop_token_ids", submit.stop_token_ids, vocab_size)
    if submit.base_len > len(submit.token_ids):
        raise LinkError(
            f"Submit.base_len is {submit.base_len}, but must be at most the number of "
            f"token_ids ({len(submit.token_ids)})"
        )
    if submit.temperature:
        _check_temperature("Submit.temperature", submit.temperature)
    _check_share("Submit.top_p", submit.top_p)
    if submit.seeded is not None:
        _check_seeded(submit.seeded)


def _check_commit(commit: Commit, vocab_size: int) -> None:
    _check_number("Commit.submission", commit.submission)
    _check_length("Commit.base_len", commit.base_len)
    _check_range("Commit.max_new_tokens", commit.max_new_tokens, 0, MAX_LOOKAHEAD)
    _check_range("the length of Commit.token_ids", len(commit.token_ids), 1, MAX_COMMIT_TOKENS)
    _check_token_ids("Commit.token_ids", commit.token_ids, vocab_size)


def _check_drafted(drafted: Drafted, vocab_size: int) -> None:
    _check_number("Drafted.submission", drafted.submission)
    _check_length("Drafted.completion", drafted.completion)
    _check_length("Drafted.base_len", drafted.base_len)
    _check_length("Drafted.start", drafted.start)
    _check_length("Drafted.known_len", drafted.known_len)
    most = MAX_DRAWN_TOKENS if drafted.candidates else MAX_DRAFTED_TOKENS
    _check_range("the length of Drafted.token_ids", len(drafted.token_ids), 0, most)
    _check_token_ids("Drafted.token_ids", drafted.token_ids, vocab_size)
    if drafted.candidates:
        _check_candidates(drafted, vocab_size)


def _check_candidates(drafted: Drafted, vocab_size: int) -> None:
    if len(drafted.candidates) != len(drafted.token_ids):
        raise LinkError(
            f"Drafted.candidates has the length {len(drafted.candidates)}, but must be empty or "
            f"have the length of Drafted.token_ids ({len(drafted.token_ids)})"
        )
    for token_id, candidates in zip(drafted.token_ids, drafted.candidates, strict=True):
        _check_candidates_of(token_id, candidates, vocab_size)


def _check_candidates_of(token_id: int, candidates: Candidates, vocab_size: int) -> None:
    token_ids, probs = candidates.token_ids, candidates.probs
    _check_range("the length of Candidates.token_ids", len(token_ids), 1, MAX_CANDIDATES)
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
    total = sum(probs)
    # If a probability is NaN, so is the total, and every comparison with NaN is false.
    if not (abs(total - 1) <= MAX_ROUNDING and min(probs) > 0 and max(probs) <= 1):
        raise LinkError(
            f"Candidates.probs are from {min(probs)} to {max(probs)} and sum to {total}, but must "
            "be above 0 and sum to 1"
        )


def _check_heartbeat(message: Heartbeat) -> None:
    for name in Heartbeat.__struct_fields__:
        if name != "step_times":
            _check_range(f"Heartbeat.{name}", getattr(message, name), 0)
    _check_range("the length of Heartbeat.step_times", len(message.step_times), 0, MAX_STEP_TIMES)
    for size, seconds in message.step_times:
        _check_range("a size in Heartbeat.step_times", size, 1)
        _check_range("a time in Heartbeat.step_times", seconds, 0)


def _check_seeded(seeded: SeededSampling) -> None:
    _check_range("SeededSampling.seed", seeded.seed, -(1 << 63), (1 << 63) - 1)
    _check_range("SeededSampling.top_k", seeded.top_k, 1, MAX_LENGTH)
    _check_share("SeededSampling.top_p", seeded.top_p)
    _check_share("SeededSampling.min_p", seeded.min_p)
    _check_temperature("SeededSampling.temperature", seeded.temperature)


def _check_size(frame: bytes, max_bytes: int) -> None:
    if len(frame) > max_bytes:
        raise LinkError(f"a frame has {len(frame)} bytes, but may have at most {max_bytes}")


def _check_range(field: str, value: float, low: float, high: int | None = None) -> None:
    if not low <= value < math.inf or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise LinkError(f"{field} is {value}, but must be {allowed}")


def _check_temperature(field: str, value: float) -> None:
    """Check a temperature; sampling divides the logits by it in float32."""
    _check_range(field, value, MIN_TEMPERATURE)


def _check_share(field: str, value: float) -> None:
    if not 0 <= value <= 1:  # refuses NaN too
        raise LinkError(f"{field} is {value}, but must be from 0 to 1")


def _check_length(field: str, value: int) -> None:
    _check_range(field, value, 0, MAX_LENGTH)


def _check_number(field: str, value: int) -> None:
    _check_range(field, value, 0, MAX_NUMBER)


def _check_text(field: str, value: str) -> None:
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
