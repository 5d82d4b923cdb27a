"""Numbers the scopes of requests, so that the sidecar can distinguish scopes.

Requests of different scopes share neither drafts nor KV. A scope consists of the LoRA adapter and
the keys by which clients divide SGLang's prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

MAX_KNOWN = 1024
"""Maximum number of scopes to remember. A forgotten scope gets a new number."""


def scope_of(req: Any) -> Hashable:
    """The scope of SGLang's `Req`: adapter, `extra_key` and `cache_salt`; None without them."""
    parts = (req.lora_id, req.extra_key, req.cache_salt)
    return parts if any(parts) else None


class Scopes:
    """The numbers of the scopes that requests have named. No number is used for two scopes.

    The sidecar gets neither names nor salts. An adapter that is loaded again has a new id in
    SGLang, and so a new number.
    """

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[Hashable, int] = {}
        """Number of each scope, the least recently named scope first."""

    def number_of(self, scope: Hashable) -> int:
        """The number of a scope, at least 1; 0 for None."""
        if scope is None:
            return 0
        number = self._known.pop(scope, None) or next(self._next)
        self._known[scope] = number
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return number
