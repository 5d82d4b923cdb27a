"""The figures of a sidecar: how each is read, and what it is called wherever it is shown.

The Heartbeat and the sidecar's /metrics are made from the table FIGURES, and at a server the
figures of its sidecars in /server_info (`engine/sidecar/activity.py`) and /metrics
(`engine/telemetry/metrics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_qspec.messages import Heartbeat

if TYPE_CHECKING:
    from sglang_qspec.link import LinkServer
    from sglang_qspec.sidecar.drafter import Drafter
    from sglang_qspec.sidecar.head_drafter import HeadDrafter
    from sglang_qspec.sidecar.kv_rows import KVRows
    from sglang_qspec.sidecar.pair_drafter import PairDrafter


@dataclass(frozen=True)
class Parts:
    """The parts of a sidecar that have its figures."""

    drafter: Drafter | HeadDrafter | PairDrafter
    rows: KVRows
    server: LinkServer


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that describes a sidecar."""

    name: str
    """Name in this table; the field of `Heartbeat` if a heartbeat has the figure."""
    read: Callable[[Parts], float]
    """The present value; only the thread of the sidecar's loop calls it."""
    help: str
    """Description of the sidecar's series, without a full stop."""
    series: str = ""
    """Name of the sidecar's series, without prefix and suffix; empty if it is `name`."""
    is_total: bool = False
    """Whether it counts since the start of the sidecar. A server shows other figures as 0 while the
    sidecar is not connected."""
    entry: str = ""
    """Name in the entry of one sidecar in a server's /server_info; empty if it is not there."""
    summary: str = ""
    """Name of the figure for all sidecars in a server's /server_info; empty if there is none."""
    is_largest: bool = False
    """Whether the figure for all sidecars is the largest one; otherwise it is the sum."""

    @property
    def is_exported(self) -> bool:
        """Whether a server has a series of the figure, called `summary`."""
        return bool(self.entry and self.summary)

    @property
    def summary_help(self) -> str:
        """Description of the server's series."""
        most = "the largest of several sidecars" if self.is_largest else "of all sidecars"
        return f"{self.help}, {most}, for all their servers."

    def of_all(self, values: Iterable[float]) -> float:
        """The figure for all sidecars of a server, from the value of each."""
        return max(values, default=0) if self.is_largest else sum(values)


FIGURES = (
    Figure(
        name="servers",
        read=lambda parts: len(parts.server.peers),
        help="Connected servers",
    ),
    Figure(
        name="requests",
        read=lambda parts: parts.drafter.requests,
        help="Requests with unfinished drafts",
        entry="drafting_requests",
        summary="drafting_requests",
    ),
    Figure(
        name="texts",
        read=lambda parts: parts.drafter.texts,
        help="Distinct prompts that the sidecar keeps",
        entry="texts",
        summary="sidecar_texts",
    ),
    Figure(
        name="rows",
        read=lambda parts: parts.drafter.advanced,
        help="Completions that the latest pass advanced",
        series="drafting_rows",
        entry="drafting_rows",
        summary="drafting_rows",
    ),
    Figure(
        name="backlog_s",
        read=lambda parts: parts.drafter.overload.backlog_s,
        help="Seconds until step drafts and first completions are done",
        series="backlog_seconds",
        entry="backlog_seconds",
        summary="sidecar_backlog_seconds",
        is_largest=True,
    ),
    Figure(
        name="overload",
        read=lambda parts: parts.drafter.overload.level,
        help="Level of overload, 0 to 5",
        entry="overload",
        summary="sidecar_overload",
        is_largest=True,
    ),
    Figure(
        name="kv_rows",
        read=lambda parts: parts.rows.open_rows,
        help="Open rows of the draft model's KV",
        entry="kv_rows",
        summary="sidecar_kv_rows",
    ),
    Figure(
        name="kv_tokens",
        read=lambda parts: parts.rows.total_slots - parts.rows.free_slots,
        help="KV slots in use",
        entry="kv_tokens",
        summary="sidecar_kv_tokens",
    ),
    Figure(
        name="kv_tokens_available",
        read=lambda parts: parts.rows.total_slots,
        help="KV slots, free or in use",
    ),
    Figure(
        name="drafted_tokens",
        read=lambda parts: parts.drafter.statistics.drafted_tokens,
        help="Tokens that the draft model drafted",
        is_total=True,
        entry="drafted_tokens",
        summary="drafted_tokens",
    ),
    Figure(
        name="pass_seconds",
        read=lambda parts: parts.drafter.statistics.pass_seconds,
        help="Seconds of the draft model's passes",
        is_total=True,
        entry="pass_seconds",
        summary="sidecar_pass_seconds",
    ),
    Figure(
        name="step_passes",
        read=lambda parts: parts.drafter.statistics.step_passes,
        help="Passes that advanced step drafts",
        is_total=True,
        summary="step_passes",
    ),
    Figure(
        name="step_tokens",
        read=lambda parts: parts.drafter.statistics.step_tokens,
        help="Step draft tokens",
        is_total=True,
        summary="step_tokens",
    ),
    Figure(
        name="step_seconds",
        read=lambda parts: parts.drafter.statistics.step_seconds,
        help="Seconds of the passes that advanced step drafts",
        is_total=True,
        summary="step_seconds",
    ),
    Figure(
        name="guessed_tokens",
        read=lambda parts: parts.drafter.statistics.guessed_tokens,
        help="Guesses of the draft model's own head that its passes verified",
        is_total=True,
        entry="guessed_tokens",
        summary="sidecar_guessed_tokens",
    ),
    Figure(
        name="right_guesses",
        read=lambda parts: parts.drafter.statistics.right_guesses,
        help="Right guesses of the draft model's own head, each of which gave a token",
        is_total=True,
        entry="right_guesses",
        summary="sidecar_right_guesses",
    ),
    Figure(
        name="declined_requests",
        read=lambda parts: parts.drafter.declined,
        help="Declined submissions",
        is_total=True,
    ),
    Figure(
        name="left_out_completions",
        read=lambda parts: parts.drafter.overload.left_out,
        help="Completions that overload ended early",
        is_total=True,
    ),
    Figure(
        name="dropped_messages",
        read=lambda parts: parts.server.dropped,
        help="Messages that a server's queue did not take",
        is_total=True,
        entry="dropped_messages",
    ),
    Figure(
        name="malformed_messages",
        read=lambda parts: parts.server.malformed,
        help="Messages that the protocol does not allow",
        is_total=True,
    ),
)

REPORTED = tuple(figure for figure in FIGURES if figure.name in Heartbeat.__struct_fields__)
"""The figures that a heartbeat has; a server knows no others of its sidecars."""


def heartbeat(parts: Parts) -> Heartbeat:
    """The present load and counters of the sidecar, for its servers."""
    statistics = parts.drafter.statistics
    found: dict[str, Any] = {figure.name: figure.read(parts) for figure in REPORTED}
    return Heartbeat(
        **found, step_times=statistics.step_times, read_seconds=statistics.read_seconds
    )
