"""The measurement of a cell: the answers of its requests, and the counters of its server."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmark.harness.statistics import percentile
from sglang_qspec.config import PIPELINES
from sglang_qspec.draft_source import OF_SIDECAR

COUNTED = ("passes", "requests", "input_tokens", "seconds", "waited_seconds")
"""Counters of a pipeline: verify passes; requests and tokens (padding included) summed over them;
their seconds without waits; seconds in which the target waited for drafts."""


class CounterError(RuntimeError):
    """The server or its sidecar restarted, so the counters do not cover the interval."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request. Times are in seconds, counts in tokens."""

    output_ids: tuple[int, ...]
    latency: float
    """From the request's arrival to its end, time in the queue included."""
    service: float
    """From the end of the request's time in the queue to its end."""
    passes: int
    """Target passes of the request after its prefill."""
    proposed: int = 0
    """Verified draft tokens."""
    accepted: Mapping[str, int] = field(default_factory=dict)
    """Accepted draft tokens by source."""

    @property
    def tokens(self) -> int:
        return len(self.output_ids)

    @property
    def match_rate(self) -> float | None:
        """Share of the proposed draft tokens that were accepted; None if none were proposed."""
        return sum(self.accepted.values()) / self.proposed if self.proposed else None


@dataclass(frozen=True)
class Counters:
    """Counters of a server's passes and of its sidecar, since the start or in a cell."""

    pipelines: Mapping[str, Mapping[str, float]]
    """The counters of COUNTED, by the name of the pipeline."""
    drafted: int
    """Tokens that the sidecar drafted."""
    step_seconds: float
    """Seconds in which the sidecar's model drafted for running requests."""
    step_passes: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Counters:
        """Read the counters from `internal_states[0]["qspec"]` of /server_info."""
        pipelines = {
            name: {field: counts[field] for field in COUNTED}
            for name, counts in state["pipelines"].items()
            if name in ("queue", *PIPELINES)
        }
        return cls(pipelines, state["drafted_tokens"], state["step_seconds"], state["step_passes"])

    def since(self, before: Counters) -> Counters:
        """The difference to `before`. Raises CounterError if a counter fell."""
        pipelines = {
            name: {field: count - before.pipelines[name][field] for field, count in counts.items()}
            for name, counts in self.pipelines.items()
        }
        drafted = self.drafted - before.drafted
        steps = self.step_passes - before.step_passes
        if min(drafted, steps, *(counts["passes"] for counts in pipelines.values())) < 0:
            raise CounterError("the server or its sidecar restarted while it was measured")
        return Counters(pipelines, drafted, self.step_seconds - before.step_seconds, steps)

    def total(self, counter: str) -> float:
        """One of COUNTED over all pipelines."""
        return sum(counts[counter] for counts in self.pipelines.values())


@dataclass(frozen=True)
class Run:
    """The measurement of a cell. Times are in seconds, counts in tokens."""

    seconds: float
    """From the first arrival to the last answer."""
    answers: tuple[Answer, ...]
    """The answers in the order of the prompts."""
    others_share: float = 0.0
    """Share of all processors that processes other than server, sidecar and client took."""
    prefill_seconds: float = 0.0
    """Seconds in which the target prefilled and decoded nothing."""
    counters: Counters | None = None
    """Counters of this cell; None without a sidecar."""
    retried: int = 0
    """Number of requests that the server answered at the second attempt."""

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second without the prefill time and the token that each prefill gives."""
        return (self.tokens - len(self.answers)) / (self.seconds - self.prefill_seconds)

    @property
    def latency_mean(self) -> float:
        return statistics.mean(answer.latency for answer in self.answers)

    @property
    def latency_p99(self) -> float:
        return percentile([answer.latency for answer in self.answers], 0.99)

    @property
    def service_mean(self) -> float:
        return statistics.mean(answer.service for answer in self.answers)

    @property
    def service_p99(self) -> float:
        return percentile([answer.service for answer in self.answers], 0.99)

    @property
    def passes(self) -> int:
        """Passes after the prefills, summed over the requests."""
        return sum(answer.passes for answer in self.answers)

    @property
    def proposed(self) -> int:
        return sum(answer.proposed for answer in self.answers)

    @property
    def accepted(self) -> Counter[str]:
        """Accepted draft tokens by source."""
        return _total(answer.accepted for answer in self.answers)

    @property
    def accept_len(self) -> float:
        """Output tokens per target pass after the prefill; 1 without speculation."""
        return (self.tokens - len(self.answers)) / self.passes if self.passes else 1.0

    @property
    def match_rate(self) -> float | None:
        """Share of the proposed draft tokens that were accepted; None if none were proposed."""
        return self.accepted.total() / self.proposed if self.proposed else None

    @property
    def proposed_per_pass(self) -> float:
        """Proposed draft tokens of a request in a pass."""
        return self.proposed / max(1, self.passes)

    @property
    def accepted_per_pass(self) -> float:
        """Accepted draft tokens of a request in a pass, also those behind the end of an answer."""
        return self.accepted.total() / max(1, self.passes)

    @property
    def passes_per_token(self) -> float:
        """Target passes with prefills, per output token; 1 without speculation."""
        return (len(self.answers) + self.passes) / self.tokens

    @property
    def drafted(self) -> int | None:
        """Tokens that the sidecar drafted; None without a sidecar."""
        return None if self.counters is None else self.counters.drafted

    @property
    def wasted(self) -> int | None:
        """Drafted tokens that no pass accepted; None without a sidecar."""
        used = sum(self.accepted[source.name.lower()] for source in OF_SIDECAR)
        return None if self.drafted is None else self.drafted - used

    @property
    def verify_s(self) -> float | None:
        """V: seconds of a verify pass, without waits."""
        return self._per_pass("seconds")

    @property
    def waited_s(self) -> float | None:
        """Seconds that the target waited for drafts, per verify pass."""
        return self._per_pass("waited_seconds")

    @property
    def draft_s(self) -> float | None:
        """D: seconds that the sidecar drafted for running requests, per verify pass."""
        if self.counters is None or not self.counters.total("passes"):
            return None
        return self.counters.step_seconds / self.counters.total("passes")

    @property
    def hidden_share(self) -> float | None:
        """Share of the drafting time in which the target did not wait; at least 0."""
        if not self.draft_s or self.waited_s is None:
            return None
        return max(0.0, 1 - self.waited_s / self.draft_s)

    @property
    def batch(self) -> float | None:
        """Requests per verify pass."""
        return self._per_pass("requests")

    @property
    def width(self) -> float | None:
        """Tokens of a request in a verify pass, with its last committed token and padding."""
        tokens, requests = self._per_pass("input_tokens"), self._per_pass("requests")
        return None if tokens is None or not requests else tokens / requests

    def _per_pass(self, counter: str) -> float | None:
        if self.counters is None or not (passes := self.counters.total("passes")):
            return None
        return self.counters.total(counter) / passes


def joined(runs: Sequence[Run]) -> Run:
    """Consecutive runs of one server as one run."""
    counters = [run.counters for run in runs if run.counters is not None]
    return Run(
        sum(run.seconds for run in runs),
        tuple(answer for run in runs for answer in run.answers),
        max(run.others_share for run in runs),
        sum(run.prefill_seconds for run in runs),
        _sum(counters) if counters else None,
        sum(run.retried for run in runs),
    )


def _sum(counters: Sequence[Counters]) -> Counters:
    names = dict.fromkeys(name for one in counters for name in one.pipelines)
    return Counters(
        {name: _total(one.pipelines.get(name, {}) for one in counters) for name in names},
        sum(one.drafted for one in counters),
        sum(one.step_seconds for one in counters),
        sum(one.step_passes for one in counters),
    )


def _total(counts: Iterable[Mapping[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def pairs(run: Run, other: Run) -> Iterable[tuple[Answer, Answer]]:
    """The answers of both runs to each prompt."""
    return zip(run.answers, other.answers, strict=True)


def identical_share(run: Run, other: Run) -> float:
    """Share of the requests that have the same output in both runs."""
    return statistics.fmean(a.output_ids == b.output_ids for a, b in pairs(run, other))
