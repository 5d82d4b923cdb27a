"""Draws frames for both ends of the link, valid and mutated, from one random generator.

A run is a list of records, each an operation (0 to 255) and a frame. `pack` and `unpack` turn the
list into the bytes that a coverage-guided fuzzer mutates, and back.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link.frame import encode
from sglang_qspec.messages import (
    MAX_LOOKAHEAD,
    PROTOCOL,
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
    States,
    Submit,
    ToSidecar,
    Welcome,
)
from test.fuzz.examples import up_to

Record = tuple[int, bytes]
"""An operation and its frame."""

SUBMISSIONS = 12
"""Submission numbers stay below this, so that most messages name an open submission."""
TEMPERATURES = (1e-6, 1e-3, 0.6, 1.0, 40.0, 1e6, 3e38, 1e39, 1.7e308)
"""Temperatures that the protocol allows, including its bounds."""
EXTREMES: tuple[object, ...] = (
    *(-(1 << 63), -(1 << 31), -1, 0, 1, 64, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1),
    *TEMPERATURES,
    *(5e-324, 1e-46, 1e-38, 9e-7),
    *(float("nan"), float("inf"), -0.0, -1e-300),
    *(None, True, "", "submit", "x" * 5000, b"", b"\xff" * 9, [], {}, [0] * 600, [[]] * 40),
    *({"type": "commits"}, {1: 2}, [None, "a", 1.5], ["\ud800" * 0, "\u0000"]),
)
"""Values that replace a field, of every msgpack type."""
HEADS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff")
"""Headers of lists, maps and strings that announce far more items than follow."""

REPEATED_TO = 64
"""Minimum number of records in a run to be varied."""

_decode = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder().encode


class Frames:
    """Draws frames. Token ids are below `vocab_size`, and texts have at most `text_len` tokens.

    Most states have the `width` of a head.
    """

    def __init__(self, rng: random.Random, vocab_size: int, text_len: int, width: int = 8) -> None:
        self._rng = rng
        self._width = width
        self._vocab_size = vocab_size
        self._text_len = text_len

    def to_sidecar(self) -> bytes:
        """A frame from a server, valid in three of five cases, otherwise mutated."""
        return self._sometimes_mutated(encode(self.from_a_server(), 1 << 24))

    def from_sidecar(self) -> bytes:
        """A frame from a sidecar, valid in three of five cases, otherwise mutated."""
        return self._sometimes_mutated(encode(self.from_a_sidecar()))

    def from_a_server(self) -> ToSidecar:
        """A valid message from a server."""
        rng = self._rng
        kind = rng.randrange(20)
        if kind < 8:
            return self._submit()
        if kind < 14:
            return Commits([self._commit() for _ in range(rng.choice((1, 1, 2, 5)))])
        if kind < 16:
            return Admit(self._submission())
        if kind < 17:
            return Close(self._submission())
        if kind < 18:
            return self._states()
        if kind < 19:
            return Ping(rng.randrange(9))
        return Hello(PROTOCOL, self._vocab_size, "f" * 64, rng.randrange(9))

    def from_a_sidecar(self) -> FromSidecar:
        """A valid message from a sidecar."""
        rng = self._rng
        kind = rng.randrange(20)
        if kind < 12:
            return self._drafted()
        if kind < 15:
            return Gap(self._submission(), rng.choice((None, 0, 1, rng.randrange(60))))
        if kind < 16:
            wait_s = rng.choice((0.0, 0.0, 1e-9, 1e9))
            return Declined(self._submission(), "by chance", rng.random() < 0.5, wait_s)
        if kind < 17:
            return Welcome(PROTOCOL, "any", self._vocab_size, 64, "s", number=rng.randrange(9))
        if kind < 18:
            return Refusal("by chance")
        times = [(1.0 + size, 0.01 * size) for size in range(rng.randrange(4))]
        level = rng.choice((0, 3, 5, 1 << 40))
        return Heartbeat(
            *(1, 1, 1, 0, rng.randrange(9)),
            step_times=times,
            read_seconds=rng.choice((0.0, 1e-9, 1e9)),
            overload=level,
        )

    def _states(self) -> States:
        rng = self._rng
        size = rng.choice((0, 1, 2 * self._width, 2 * self._width * rng.randrange(1, 9)))
        return States(self._submission(), rng.randrange(self._text_len), rng.randbytes(size))

    def mutate(self, frame: bytes) -> bytes:
        """The frame with one or several mutations."""
        rng = self._rng
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            frame = rng.choice(_MUTATORS)(frame, rng)
        return frame

    def _sometimes_mutated(self, frame: bytes) -> bytes:
        return self.mutate(frame) if self._rng.random() < 0.4 else frame

    def _submission(self) -> int:
        return self._rng.randrange(SUBMISSIONS)

    def _tokens(self, most: int) -> list[int]:
        """Usually a prefix of one text, so that texts share prefixes and drafts agree."""
        count = self._rng.randint(1, most)
        if self._rng.random() < 0.6:
            return [place % self._vocab_size for place in range(count)]
        return self._rng.choices(range(self._vocab_size), k=count)

    def _submit(self) -> Submit:
        rng = self._rng
        token_ids = self._tokens(self._text_len)
        return Submit(
            self._submission(),
            token_ids,
            base_len=rng.randint(0, min(4, len(token_ids))),
            max_new_tokens=rng.choice((0, 1, 4, 9, 30, (1 << 31) - 1)),
            completions=1000 if rng.random() < 0.02 else rng.choice((0, 1, 2, 3, 7)),
            temperature=rng.choice((0.0, 0.6, 1.0, rng.choice(TEMPERATURES))),
            stop_token_ids=rng.choice(([], [], self._tokens(3))),
            ignore_eos=rng.random() < 0.5,
            top_p=rng.choice((1.0, 1.0, 0.0, 0.5, 1e-300)),
            greedy_first=rng.random() < 0.7,
            rank=rng.choice(((0, 0), (-3, 7), ((1 << 63) - 1, -(1 << 63)))),
            seeded=self._seeded_sampling() if rng.random() < 0.4 else None,
            scope=rng.choice((0, 0, 1, 2, (1 << 63) - 1)),
        )

    def _seeded_sampling(self) -> SeededSampling:
        rng = self._rng
        return SeededSampling(
            rng.choice((0, 1, 2, -(1 << 63), (1 << 63) - 1)),
            rng.choice((0.6, 1.0, rng.choice(TEMPERATURES))),
            rng.choice((1 << 30, 1, 2, (1 << 31) - 1)),
            rng.choice((1.0, 0.0, 0.5, 1e-300)),
            rng.choice((0.0, 0.0, 1.0, 0.5)),
            rng.random() < 0.3,
        )

    def _commit(self) -> Commit:
        rng = self._rng
        base_len = rng.choice((0, 1, 2, 3, rng.randrange(40), (1 << 31) - 1))
        lookahead = rng.choice((0, 1, 4, 9, MAX_LOOKAHEAD))
        return Commit(self._submission(), base_len, self._tokens(6), lookahead)

    def _drafted(self) -> Drafted:
        rng = self._rng
        step = MAX_COMPLETIONS + rng.randrange(5)
        token_ids = rng.choice(([], self._tokens(4), self._tokens(30)))
        base_len = rng.choice((0, 0, 1, rng.randrange(60)))
        return Drafted(
            self._submission(),
            rng.choice((0, 1, 2, step, step, 7, (1 << 20) - 1, 1 << 20, (1 << 31) - 1)),
            base_len,
            rng.choice((0, 0, 0, 4, rng.randrange(60), (1 << 31) - 1)),
            token_ids,
            rng.random() < 0.3,
            rng.choice((0, base_len, rng.randrange(60))),
            [self._candidates(token) for token in token_ids] if rng.random() < 0.2 else [],
        )

    def _candidates(self, token: int) -> Candidates:
        others = {self._rng.randrange(self._vocab_size) for _ in range(3)} - {token}
        token_ids = [token, *others]
        return Candidates(token_ids, [1 / len(token_ids)] * len(token_ids))


def records(
    vocab_size: int, text_len: int, *, to_sidecar: bool, most: int = 60
) -> st.SearchStrategy[list[Record]]:
    """Lists of records; a failing list shrinks to the records that cause the failure."""

    def record(drawn: tuple[int, int]) -> Record:
        operation, seed = drawn
        frames = Frames(random.Random(seed), vocab_size, text_len)
        return operation, frames.to_sidecar() if to_sidecar else frames.from_sidecar()

    drawn = st.tuples(st.integers(0, 255), st.integers(0, (1 << 32) - 1)).map(record)
    return up_to(most, drawn)


def pack(run: list[Record]) -> bytes:
    """The records as bytes; each frame is cut to 65,535 bytes."""
    cut = ((operation, frame[:0xFFFF]) for operation, frame in run)
    return b"".join(struct.pack("<BH", op, len(frame)) + frame for op, frame in cut)


def unpack(data: bytes) -> list[Record]:
    """The records in `data`, which may be any bytes."""
    run = []
    place = 0
    while place + 3 <= len(data):
        operation, size = struct.unpack_from("<BH", data, place)
        run.append((operation, data[place + 3 : place + 3 + size]))
        place += 3 + size
    return run


def vary(data: bytes, rng: random.Random, fresh: Callable[[], bytes], most_bytes: int) -> bytes:
    """A packed run with an eighth of its records changed; `fresh` draws a frame for a new one.

    A short run is repeated first, so that the cost of starting and ending a run covers more frames.
    """
    run = unpack(data)
    if run:
        run *= -(-REPEATED_TO // len(run))
    for _ in range(1 + len(run) // 8):
        place = rng.randint(0, len(run))
        kind = rng.randrange(8)
        if kind < 3 or place == len(run):
            run.insert(place, (rng.randrange(256), fresh()))
        elif kind == 3:
            run[place] = (run[place][0], fresh())
        elif kind == 4:
            run[place] = (rng.randrange(256), run[place][1])
        elif kind == 5:
            run[place] = (run[place][0], rng.choice(_MUTATORS)(run[place][1], rng))
        elif kind == 6:
            run.insert(rng.randint(0, len(run)), run[place])
        else:
            del run[place]
    return pack(run)[:most_bytes]


def _flip(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 3))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_byte(frame: bytes, rng: random.Random) -> bytes:
    changed = bytearray(frame)
    if changed:
        changed[rng.randrange(len(changed))] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xFF))
    return bytes(changed)


def _truncate(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randint(0, len(frame))]


def _splice(frame: bytes, rng: random.Random) -> bytes:
    """The frame with one piece copied to another place."""
    start, at = rng.randint(0, len(frame)), rng.randint(0, len(frame))
    piece = frame[start : start + rng.randint(0, 20)]
    return frame[:at] + piece + frame[at + rng.choice((0, len(piece))) :]


def _inflate(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.choice(HEADS) + frame[at + rng.choice((0, 1)) :]


def _nest(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(frame))
    head = rng.choice((b"\x91", b"\x81\xa1x", b"\x81"))
    return frame[:at] + head * rng.choice((2, 40, 3000)) + frame[at:]


def _swap_type(frame: bytes, rng: random.Random) -> bytes:
    """Replace, remove or add a value somewhere in the message."""
    try:
        message = _decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, TypeError):
        return _flip(frame, rng)
    inner: Any = message
    while True:
        if isinstance(inner, dict) and inner:
            key: Any = rng.choice(list(inner))
        elif isinstance(inner, list) and inner:
            key = rng.randrange(len(inner))
        else:
            return _encode(rng.choice(EXTREMES))
        if not isinstance(inner[key], dict | list) or not inner[key] or rng.random() < 0.3:
            break
        inner = inner[key]
    kind = rng.randrange(6)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, dict):
        inner[f"{key}"[:30] + "x"] = rng.choice(EXTREMES)
    elif kind == 2 and isinstance(inner, list):
        inner *= rng.choice((2, 40, 300)) if len(inner) < 100 else 2
    else:
        inner[key] = rng.choice(EXTREMES)
    try:
        return _encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError):
        return frame


def _repeat_key(frame: bytes, rng: random.Random) -> bytes:
    """The message with one key of the outermost map repeated, with another value."""
    try:
        message = _decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, TypeError):
        return frame
    if not isinstance(message, dict) or not 0 < len(message) < 15 or not 0x80 < frame[0] < 0x8F:
        return frame
    key = rng.choice(list(message))
    value = rng.choice((message[key], rng.choice(EXTREMES)))
    return bytes([frame[0] + 1]) + frame[1:] + _encode(key) + _encode(value)


_MUTATORS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    _set_byte,
    _truncate,
    _splice,
    _inflate,
    _nest,
    _repeat_key,
    *(_swap_type,) * 4,
)
