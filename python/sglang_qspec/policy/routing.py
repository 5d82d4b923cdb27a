"""Chooses a sidecar for a prompt, so that prompts that share KV meet on one sidecar.

Prompts of one scope with the same beginning choose the same sidecar (`policy.rendezvous`). Prompts
of different scopes share no KV, so each scope makes its own choice.

A beginning that nearly all prompts share, such as a system prompt, would leave the other sidecars
idle. So no sidecar gets many more of a server's requests than its share ("Consistent Hashing with
Bounded Loads", Mirrokni, Thorup and Zadimoghaddam, 2018). A prompt beyond this bound chooses among
the other sidecars by its whole text, so that equal prompts still meet.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sglang_qspec.policy import rendezvous

BEGINNING = 64
"""Number of tokens at the beginning of a prompt that choose its sidecar."""
SLACK = 1.5
"""Bound on a sidecar's requests, relative to its share of all requests."""
FEW = 4
"""Number of requests up to which a sidecar has no bound."""
DIGEST_BYTES = 16
"""Size of a digest; blake2b takes a salt of at most this size."""


@dataclass(frozen=True)
class Route:
    """Digests of a prompt and its scope."""

    beginning: bytes
    """Digest of the scope and the first BEGINNING tokens."""
    whole: bytes
    """Digest of the scope and all tokens."""

    @classmethod
    def of(cls, token_ids: Sequence[int], scope: Hashable = None) -> Route:
        """The digests of a prompt; equal in all processes.

        `scope` is None, or a tuple of strings and None.
        """
        tokens = array("q", token_ids).tobytes()
        salt = b"" if scope is None else _digest(repr(scope).encode())
        return cls(_digest(tokens[: 8 * BEGINNING], salt), _digest(tokens, salt))


def _digest(data: bytes, salt: bytes = b"") -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES, salt=salt).digest()


@dataclass(frozen=True)
class Candidate:
    """A sidecar that may get the request."""

    weight: float
    """Relative number of requests that it should get, over 0."""
    requests: int
    """Number of live requests of this server that it has."""


def choose(route: Route, candidates: Mapping[str, Candidate]) -> str:
    """The name of the sidecar for a prompt, among at least one."""
    weights = {name: each.weight for name, each in candidates.items()}
    preferred = rendezvous.choose(route.beginning, weights)
    free = _with_room(candidates)
    if preferred in free:
        return preferred
    return rendezvous.choose(route.whole, {name: weights[name] for name in free})


def _with_room(candidates: Mapping[str, Candidate]) -> set[str]:
    """Names of the sidecars below their bounds; the sum of the bounds exceeds all requests."""
    requests = 1 + sum(each.requests for each in candidates.values())
    unit = SLACK * requests / sum(each.weight for each in candidates.values())
    return {
        name
        for name, each in candidates.items()
        if each.requests < max(FEW, math.ceil(unit * each.weight))
    }
