"""The messages that the protocol allows, written from the field descriptions in `messages`.

This file tests `link.frame` and the bounds in the types of the fields, so it uses neither.
"""

from __future__ import annotations

import math

from sglang_qspec.messages import (
    MAX_CANDIDATES,
    MAX_COMMIT_TOKENS,
    MAX_COMMITS,
    MAX_DRAFTED_TOKENS,
    MAX_DRAWN_TOKENS,
    MAX_LOOKAHEAD,
    MAX_STATE_BYTES,
    MAX_STOP_TOKENS,
    MIN_TEMPERATURE,
    Admit,
    Close,
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
    States,
    Submit,
    ToSidecar,
    Welcome,
)

INT32 = 2**31
INT64 = 2**63
MAX_TEXT = 4096


def check_to_sidecar(message: ToSidecar, vocab_size: int) -> None:
    """Raise AssertionError unless a server may send this message."""
    if isinstance(message, Submit):
        assert 0 <= message.submission < INT64
        assert message.token_ids
        _check_tokens(message.token_ids, vocab_size)
        _check_tokens(message.stop_token_ids, vocab_size)
        assert len(message.stop_token_ids) <= MAX_STOP_TOKENS
        assert 0 <= message.base_len <= len(message.token_ids)
        assert 0 <= message.max_new_tokens < INT32
        assert 0 <= message.completions < INT32
        assert message.temperature == 0 or MIN_TEMPERATURE <= message.temperature < math.inf
        assert 0 <= message.top_p <= 1
        assert 0 <= message.scope < INT64
        if message.seeded is not None:
            _check_seeded(message.seeded)
    elif isinstance(message, Commits):
        assert len(message.requests) <= MAX_COMMITS
        for commit in message.requests:
            assert 0 <= commit.submission < INT64
            assert 0 <= commit.base_len < INT32
            assert 0 <= commit.max_new_tokens <= MAX_LOOKAHEAD
            assert 1 <= len(commit.token_ids) <= MAX_COMMIT_TOKENS
            _check_tokens(commit.token_ids, vocab_size)
    elif isinstance(message, Hello):
        assert len(message.fingerprint) <= MAX_TEXT
        assert 0 < message.vocab_size < INT32
        assert 0 <= message.number < INT64
    elif isinstance(message, Ping):
        assert 0 <= message.number < INT64
    elif isinstance(message, States):
        assert 0 <= message.submission < INT64
        assert 0 <= message.start < INT32
        assert len(message.data) <= MAX_STATE_BYTES
    else:
        assert isinstance(message, Admit | Close)
        assert 0 <= message.submission < INT64


def check_from_sidecar(message: FromSidecar, vocab_size: int) -> None:
    """Raise AssertionError unless a sidecar may send this message."""
    if isinstance(message, Drafted):
        _check_drafted(message, vocab_size)
    elif isinstance(message, Gap):
        assert 0 <= message.submission < INT64
        assert message.known_len is None or 0 <= message.known_len < INT32
    elif isinstance(message, Declined):
        assert 0 <= message.submission < INT64
        assert len(message.reason) <= MAX_TEXT
    elif isinstance(message, Refusal):
        assert len(message.reason) <= MAX_TEXT
    elif isinstance(message, Welcome):
        assert max(len(message.model), len(message.session)) <= MAX_TEXT
        assert 0 <= message.vocab_size < INT32
        assert 0 <= message.context_len < INT32
        assert message.max_text_tokens >= 0
    else:
        assert isinstance(message, Heartbeat)
        assert min(message.requests, message.rows, message.drafted_tokens, message.answers) >= 0
        assert min(message.dropped_messages, message.step_passes, message.step_tokens) >= 0
        assert min(message.texts, message.kv_rows, message.kv_tokens) >= 0
        assert 0 <= message.step_seconds < math.inf
        assert 0 <= message.read_seconds < math.inf
        assert all(1 <= n < math.inf and 0 <= s < math.inf for n, s in message.step_times)


def _check_drafted(message: Drafted, vocab_size: int) -> None:
    numbers = (message.completion, message.base_len, message.start, message.known_len)
    assert 0 <= message.submission < INT64
    assert all(0 <= number < INT32 for number in numbers)
    assert len(message.token_ids) <= MAX_DRAFTED_TOKENS
    _check_tokens(message.token_ids, vocab_size)
    if not message.candidates:
        return
    assert len(message.candidates) == len(message.token_ids) <= MAX_DRAWN_TOKENS
    for token, candidates in zip(message.token_ids, message.candidates, strict=True):
        assert token in candidates.token_ids
        assert len(set(candidates.token_ids)) == len(candidates.token_ids) <= MAX_CANDIDATES
        assert len(candidates.probs) == len(candidates.token_ids)
        _check_tokens(candidates.token_ids, vocab_size)
        assert all(0 < prob <= 1 for prob in candidates.probs)
        assert math.isclose(sum(candidates.probs), 1, abs_tol=1e-3)


def _check_seeded(seeded: SeededSampling) -> None:
    assert -INT64 <= seeded.seed < INT64
    assert MIN_TEMPERATURE <= seeded.temperature < math.inf
    assert 1 <= seeded.top_k < INT32
    assert 0 <= seeded.top_p <= 1
    assert 0 <= seeded.min_p <= 1


def _check_tokens(token_ids: list[int], vocab_size: int) -> None:
    assert all(0 <= token < vocab_size for token in token_ids)
