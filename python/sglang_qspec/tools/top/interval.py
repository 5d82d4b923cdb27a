"""What a server did between two snapshots of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.config import MODES
from sglang_qspec.draft_source import SOURCES, Source
from sglang_qspec.errors import ClientError
from sglang_qspec.tools.complete.peers import message

SHOWN = 40
"""Maximum length of a text of the server."""

STEP, HEAD, JACOBI, SECOND = (
    source.name.lower() for source in (Source.STEP, Source.HEAD, Source.JACOBI, Source.SECOND)
)


@dataclass(frozen=True)
class Snapshot:
    """The state of a server at one time."""

    time: float
    """Time of the answer, in seconds of any clock."""
    state: Mapping[str, Any]
    """QSPEC's part of /server_info, which docs/observability.md describes."""

    def value(self, *path: str) -> Any:
        """The field at `path`; a text is cut, and has no characters that a terminal obeys.

        Raises ClientError if the server has no such field.
        """
        found: Any = self.state
        try:
            for name in path:
                found = found[name]
        except (LookupError, TypeError):
            raise ClientError(
                f"the server's /server_info has no field {'.'.join(path)}; use the qspec command "
                "of the version that the server runs"
            ) from None
        return message(found)[:SHOWN] if isinstance(found, str) else found


@dataclass(frozen=True)
class Interval:
    """The time between the snapshots `before` and `now`, with rates and ratios of counts.

    A count that is smaller in `now` belongs to a new server or sidecar, and counts as unchanged.
    """

    before: Snapshot
    now: Snapshot

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.now.time - self.before.time

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the draft sources. `head` is among them if a head has drafted, when `step` has
        not, and `jacobi` if passes had such guesses. `second` counts with the first choices."""
        proposed = self.now.value("proposed_tokens")
        absent = {STEP if proposed.get(HEAD) else HEAD, SECOND}
        absent |= set() if proposed.get(JACOBI) else {JACOBI}
        named = self.now.value("sources")
        return tuple(name for name in SOURCES if name in named and name not in absent)

    @property
    def pipelines(self) -> tuple[str, ...]:
        """Names of the pipelines with passes in the interval."""
        return tuple(
            name
            for name in MODES
            if name in self.now.value("pipelines") and self.increase("pipelines", name, "passes")
        )

    def increase(self, *path: str) -> float:
        """Increase of the count at `path`; never negative."""
        return float(max(0.0, self.now.value(*path) - self.before.value(*path)))

    def rate(self, *path: str) -> float:
        """Increase of the count at `path` in a second."""
        return self.increase(*path) / self.seconds

    def of_source(self, field: str, source: str) -> float:
        """Increase of a count of one source; that of `step` or `head` includes `second`."""
        seconds = self.increase(field, SECOND) if source in (STEP, HEAD) else 0.0
        return self.increase(field, source) + seconds

    def of_sources(self, field: str) -> float:
        """Increase of a count by source, over all sources."""
        return sum(self.of_source(field, source) for source in self.sources)

    def of_pipelines(self, field: str) -> float:
        """Increase of a count by pipeline, over all pipelines."""
        return sum(self.increase("pipelines", name, field) for name in self.pipelines)

    @property
    def accept_length(self) -> float | None:
        """Output tokens of a pass for each request; None without passes."""
        gained = ratio(self.of_sources("accepted_tokens"), self.of_pipelines("requests"))
        return None if gained is None else 1.0 + gained

    @property
    def token_rate(self) -> float:
        """Output tokens of decode and verify passes in a second."""
        return (self.of_pipelines("requests") + self.of_sources("accepted_tokens")) / self.seconds


def ratio(part: float, whole: float) -> float | None:
    """`part` divided by `whole`; None if `whole` is 0."""
    return part / whole if whole else None
