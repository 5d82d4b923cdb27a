"""The requests that wait to be submitted to a sidecar, in the order of their Submits."""

from __future__ import annotations

from collections.abc import Set

from sglang_qspec.engine.requests.live_request import LiveRequest


class SubmitQueue:
    """The rids of unsubmitted requests: served requests first, each kind in the order of `add`."""

    def __init__(self) -> None:
        self._served: dict[str, None] = {}
        self._waiting: dict[str, None] = {}

    def __bool__(self) -> bool:
        """Whether any request waits to be submitted."""
        return bool(self._served or self._waiting)

    @property
    def first(self) -> str:
        """The rid of the next request; at least one request must wait."""
        return next(iter(self._served or self._waiting))

    @property
    def rids(self) -> Set[str]:
        """The rids of all requests."""
        return self._served.keys() | self._waiting.keys()

    def add(self, live: LiveRequest) -> None:
        """Add a request at the end of its kind."""
        (self._waiting if live.waits else self._served)[live.rid] = None

    def drop(self, rid: str) -> None:
        """Forget a request; unknown requests are ignored."""
        self._served.pop(rid, None)
        self._waiting.pop(rid, None)

    def admit(self, live: LiveRequest) -> bool:
        """Move a request that SGLang serves now. Returns whether it still waits to be submitted."""
        if live.rid in self._waiting:
            del self._waiting[live.rid]
            self.add(live)
        return live.rid in self._served
