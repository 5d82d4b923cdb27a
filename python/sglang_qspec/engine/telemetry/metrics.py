"""The Prometheus series of QSPEC in SGLang's `/metrics`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_qspec.link import LinkState
from sglang_qspec.sidecar.figures import REPORTED

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

PREFIX = "sglang:qspec_"
PUBLISH_INTERVAL_S = 1.0
FIRST_DRAFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

GAUGES = {
    "live_requests": "Queued and running requests that may get drafts.",
    "waiting_requests": "Queued requests that may get drafts.",
    "requests_in_flight": "Requests with completions that the sidecar has not finished.",
    "trie_tokens": "Tokens in the tries of all requests: drafts, prompts and outputs.",
    **{
        figure.summary: figure.summary_help
        for figure in REPORTED
        if figure.is_exported and not figure.is_total
    },
}
STATES = {
    "speculation": (
        ("on", "off", "failed"),
        "1 for the present state of speculation, otherwise 0: off is the setting `enabled` 0.",
    ),
    "sidecar": (
        ("none", *(state.value for state in LinkState)),
        "1 for the present state of the link to the sidecar, the best one of several; otherwise 0.",
    ),
}
"""Gauges `NAME_state` with one series for each value of the label `state`."""
TOTALS = {
    "eager_passes": "Decode and verify passes of the target that ran without a CUDA graph.",
    "early_passes": "Passes that were launched before the host knew the last pass's tokens.",
    "evictions": "Requests that lost their drafts to the cap on draft tokens of all requests.",
    "declined_requests": "Requests that a sidecar refused to draft for.",
    "sidecar_restarts": "Times that the server restarted its own sidecar.",
    "handovers": "Requests that another sidecar took over, because their own was not connected.",
    "link_seconds": "Seconds that the scheduler spent on messages of the sidecar, without waits.",
}
TOTALS_BY = {
    "proposed_tokens": ("source", "Draft tokens that the target verified."),
    "accepted_tokens": ("source", "Draft tokens that became output."),
    "dropped_messages": ("kind", "Messages between server and sidecar that were not delivered."),
    "refused_chunks": ("reason", "Draft chunks that a trie refused."),
}
"""Counters of `Speculator.describe` with one series for each value of a label."""
FROM_SIDECAR = "from_sidecar"
"""The kind of `dropped_messages` that the sidecars count."""
EACH_SIDECAR = {
    "sidecar_ready": "1 if this sidecar is connected, otherwise 0; NaN once it is removed.",
    "sidecar_requests": "Live requests that this sidecar drafts for.",
}
"""Gauges with one series for each number of a sidecar, the label `sidecar`."""
REPORTED_TOTALS = {
    figure.summary: figure for figure in REPORTED if figure.is_exported and figure.is_total
}
"""Counters of which each sidecar reports a part."""
TOTALS_IN = {
    "passes": ("passes", "Decode and verify passes of the target."),
    "pass_requests": ("requests", "Batch sizes, summed over the passes of the target."),
    "pass_input_tokens": ("input_tokens", "Input tokens of the passes, with drafts and padding."),
    "pass_seconds": ("seconds", "Seconds between two results of the target, without waits."),
    "waited_seconds": ("waited_seconds", "Seconds that the target waited for step drafts."),
}
"""Counters with one series for each pipeline: the field of `PassTotals`, and the help text."""
TOTALS_AT = {
    "judged": "Draft tokens that follow only right tokens, so that the target's choice is known.",
    "right": "Judged draft tokens that equal the target's choice.",
}
"""Counters of `positions` in `Speculator.describe`, one series for each source and position."""


class DraftMetrics:
    """Owns the series. Only the scheduler's thread uses it."""

    def __init__(
        self,
        labels: Mapping[str, object],
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the series with SGLang's `labels`, by default in the process's registry.

        Raises ValueError, as prometheus_client does, if the registry already has the series.
        """
        # The import reads the folder of the metrics files, which SGLang sets in the environment.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        values = {name: str(value) for name, value in labels.items()}
        names = tuple(values)
        home = registry or REGISTRY
        self._clock = clock
        self._due_at = clock()
        self._gauges = {
            name: Gauge(
                PREFIX + name, text, names, multiprocess_mode="mostrecent", registry=home
            ).labels(**values)
            for name, text in GAUGES.items()
        }
        self._states = {
            name: Gauge(
                f"{PREFIX}{name}_state",
                text,
                (*names, "state"),
                multiprocess_mode="mostrecent",
                registry=home,
            )
            for name, (_, text) in STATES.items()
        }
        self._paused = Gauge(
            PREFIX + "source_paused",
            "1 while the server pauses the draft source, otherwise 0.",
            (*names, "source"),
            multiprocess_mode="mostrecent",
            registry=home,
        )
        self._each = {
            name: Gauge(
                PREFIX + name,
                text,
                (*names, "sidecar"),
                multiprocess_mode="mostrecent",
                registry=home,
            )
            for name, text in EACH_SIDECAR.items()
        }
        self._numbers: set[int] = set()
        """Numbers of all sidecars so far."""
        self._reported = {
            name: Counter(PREFIX + name, figure.summary_help, names, registry=home)
            for name, figure in REPORTED_TOTALS.items()
        }
        self._reports: dict[tuple[str, str], _Total] = {}
        """Counts that the sidecars report, by endpoint and name; those of removed sidecars stay."""
        self._totals = {
            name: _Total(Counter(PREFIX + name, text, names, registry=home).labels(**values))
            for name, text in TOTALS.items()
        }
        self._families = {
            name: Counter(PREFIX + name, text, (*names, label), registry=home)
            for name, (label, text) in TOTALS_BY.items()
        }
        for name, (_, text) in TOTALS_IN.items():
            self._families[name] = Counter(PREFIX + name, text, (*names, "pipeline"), registry=home)
        for name, text in TOTALS_AT.items():
            own = (*names, "source", "position")
            self._families[name] = Counter(f"{PREFIX}{name}_tokens", text, own, registry=home)
        self._members: dict[tuple[str, ...], _Total] = {}
        self._labels = values
        self.first_draft = Histogram(
            PREFIX + "queue_to_first_draft_seconds",
            "Seconds from queueing a request to its first draft.",
            names,
            buckets=FIRST_DRAFT_BUCKETS_S,
            registry=home,
        ).labels(**values)

    def publish_due(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Publish what `describe` returns, at most once in `PUBLISH_INTERVAL_S` seconds."""
        now = self._clock()
        if now >= self._due_at:
            self._due_at = now + PUBLISH_INTERVAL_S
            self.publish(describe())

    def publish(self, described: Mapping[str, Any]) -> None:
        """Set all series to the values that `Speculator.describe` returned.

        `described` also has the state of `speculation`, one of `STATES`.
        """
        for name, gauge in self._gauges.items():
            gauge.set(described[name])
        for name, (states, _) in STATES.items():
            for state in states:
                shown = self._states[name].labels(**self._labels, state=state)
                shown.set(state == described[name])
        for source, figures in described["sources"].items():
            self._paused.labels(**self._labels, source=source).set(figures["paused"])
        self._publish_sidecars(described["sidecars"])
        for name, total in self._totals.items():
            total.reach(described[name])
        for name, (label, _) in TOTALS_BY.items():
            for member, count in described[name].items():
                if member != FROM_SIDECAR:
                    self._reach(name, count, **{label: member})
        for pipeline, counts in described["pipelines"].items():
            for name, (field, _) in TOTALS_IN.items():
                self._reach(name, counts[field], pipeline=pipeline)
        for source, counts in described["positions"].items():
            for name in TOTALS_AT:
                for position, count in enumerate(counts[name], start=1):
                    if not count:
                        continue  # create a series with its first count
                    self._reach(name, count, source=source, position=str(position))

    def _publish_sidecars(self, sidecars: Sequence[Mapping[str, Any]]) -> None:
        """Set the series of each sidecar, and add up the counts that the sidecars report."""
        ready = {each["number"]: each["state"] == LinkState.READY.value for each in sidecars}
        requests = {each["number"]: each["requests"] for each in sidecars}
        self._numbers |= ready.keys()
        for number in self._numbers:
            labels = {**self._labels, "sidecar": str(number)}
            self._each["sidecar_ready"].labels(**labels).set(ready.get(number, math.nan))
            self._each["sidecar_requests"].labels(**labels).set(requests.get(number, 0))
        counters = {
            REPORTED_TOTALS[name].entry: counter.labels(**self._labels)
            for name, counter in self._reported.items()
        }
        dropped = self._families["dropped_messages"]
        counters["dropped_messages"] = dropped.labels(**self._labels, kind=FROM_SIDECAR)
        for each in sidecars:
            for name, counter in counters.items():
                # A sum over the sidecars would decrease when one of them restarts.
                total = self._reports.setdefault((each["endpoint"], name), _Total(counter))
                if each[name]:  # 0 until the sidecar at a new or returning endpoint has answered
                    total.reach(each[name])

    def _reach(self, name: str, count: float, **own: str) -> None:
        """Raise the series of family `name` with the labels `own` to `count`."""
        key = (name, *own.values())
        if key not in self._members:
            self._members[key] = _Total(self._families[name].labels(**self._labels, **own))
        self._members[key].reach(count)


class _Total:
    """A Prometheus counter that follows a count of the server or the sidecar."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._reached: float = 0

    def reach(self, total: float) -> None:
        """Raise the counter to `total`. A smaller total means a restarted sidecar, and is added."""
        self._counter.inc(total - self._reached if total >= self._reached else total)
        self._reached = total
