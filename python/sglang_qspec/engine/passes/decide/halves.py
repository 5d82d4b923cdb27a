"""Assigns each running request to one of two halves of the batch."""

from __future__ import annotations

from collections.abc import Sequence


class Halves:
    """Keeps two halves with sizes that differ by at most one request, and moves few requests.

    The sidecar drafts for one half while the target verifies the other, so a request that changes
    halves loses half a round. A new request joins the smaller half. When requests leave and the
    sizes differ by more than one, the latest requests of the larger half move to the other.
    """

    def __init__(self) -> None:
        self._half: dict[str, int] = {}
        """Half of each request, 0 or 1, in the order in which requests joined their half."""

    def split(self, rids: Sequence[str]) -> tuple[list[int], list[int]]:
        """Indices into `rids` of the requests of half 0, and of half 1."""
        running = set(rids)
        self._half = {rid: half for rid, half in self._half.items() if rid in running}
        for rid in rids:
            if rid not in self._half:
                self._half[rid] = int(self._surplus() > 0)
        while abs(surplus := self._surplus()) > 1:
            larger = int(surplus < 0)
            latest = next(rid for rid in reversed(self._half) if self._half[rid] == larger)
            del self._half[latest]
            self._half[latest] = 1 - larger
        rows: tuple[list[int], list[int]] = ([], [])
        for row, rid in enumerate(rids):
            rows[self._half[rid]].append(row)
        return rows

    def _surplus(self) -> int:
        """Number of requests in half 0 minus the number in half 1."""
        return len(self._half) - 2 * sum(self._half.values())
