"""Which half of the running batch each request belongs to."""

from __future__ import annotations

from collections.abc import Sequence


class Halves:
    """Keeps two halves whose sizes differ by at most one, and requests where they are.

    While one half is verified the sidecar drafts for the other, so a request that changes sides
    loses half a round. As few as possible do: newcomers join the smaller half, and when requests
    that have left make the halves differ, the latest of the larger one go over.
    """

    def __init__(self) -> None:
        self._half: dict[str, int] = {}
        """0 or 1, in the order in which the requests joined their half."""

    def split(self, rids: Sequence[str]) -> tuple[list[int], list[int]]:
        """The batch that runs now: its rows that are in half 0, and those that are in half 1."""
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
        """How many requests half 0 has more than half 1."""
        return len(self._half) - 2 * sum(self._half.values())
