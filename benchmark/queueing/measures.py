"""The figures of a configuration, from its answers and those without speculation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmark.queueing.serving import Answer, BlockRun

Round = Mapping[str, Sequence[BlockRun]]
"""One round: the runs of each configuration that could be served, over the same blocks."""


@dataclass(frozen=True)
class Measures:
    """One configuration in one round, or the medians of several. Latencies are in seconds."""

    tokens: float
    """Of all outputs."""
    tokens_per_s: float
    mean_latency: float
    p99_latency: float
    accept_len: float
    """Output tokens per target pass after the prompt's; 1 without speculation.

    Draft tokens that were accepted beyond an output's end do not count.
    """
    match_rate: float | None
    """Share of the proposed draft tokens that were accepted; None if none were proposed."""
    passes_per_token: float
    """Target passes, the prompts' included, over output tokens; 1 without speculation."""
    accepted: Mapping[str, int]
    """Draft tokens by source, over all rounds."""
    drafted: float | None
    """Tokens that the sidecar drafted."""
    wasted: float | None
    """Drafted tokens that were not accepted."""
    speedup: float | None
    """Tokens/s over those without speculation; None if there was no such run."""
    identical: float | None
    """Share of the requests with the output of no speculation; of several rounds, the least."""
    retried: int
    """Requests that were answered at the second attempt, over all rounds."""


def measure(runs: Sequence[BlockRun], plain: Sequence[BlockRun] | None) -> Measures:
    """One round's figures, over the blocks in `runs`; `plain` are those of `none` in turn."""
    answers = [answer for run in runs for answer in run.answers]
    latencies = [answer.latency for answer in answers]
    tokens = sum(answer.tokens for answer in answers)
    passes = sum(answer.passes for answer in answers)
    proposed = sum(answer.proposed for answer in answers)
    accepted = _by_source(answer.accepted for answer in answers)
    drafted = _drafted(runs)
    used = accepted.get("queue", 0) + accepted.get("step", 0)
    tokens_per_s = _tokens_per_s(runs)
    return Measures(
        tokens=tokens,
        tokens_per_s=tokens_per_s,
        mean_latency=statistics.mean(latencies),
        p99_latency=percentile(latencies, 0.99),
        accept_len=(tokens - len(answers)) / passes if passes else 1.0,
        match_rate=sum(accepted.values()) / proposed if proposed else None,
        passes_per_token=(len(answers) + passes) / tokens,
        accepted=accepted,
        drafted=drafted,
        wasted=None if drafted is None else drafted - used,
        speedup=None if plain is None else tokens_per_s / _tokens_per_s(plain),
        identical=None if plain is None else identical_share(runs, plain),
        retried=sum(run.retried for run in runs),
    )


def medians(rounds: Sequence[Measures]) -> Measures:
    """Of each figure its median over the rounds, except where Measures says otherwise."""
    return Measures(
        tokens=statistics.median(m.tokens for m in rounds),
        tokens_per_s=statistics.median(m.tokens_per_s for m in rounds),
        mean_latency=statistics.median(m.mean_latency for m in rounds),
        p99_latency=statistics.median(m.p99_latency for m in rounds),
        accept_len=statistics.median(m.accept_len for m in rounds),
        match_rate=_median([m.match_rate for m in rounds]),
        passes_per_token=statistics.median(m.passes_per_token for m in rounds),
        accepted=_by_source(m.accepted for m in rounds),
        drafted=_median([m.drafted for m in rounds]),
        wasted=_median([m.wasted for m in rounds]),
        speedup=_median([m.speedup for m in rounds]),
        identical=min((m.identical for m in rounds if m.identical is not None), default=None),
        retried=sum(m.retried for m in rounds),
    )


def identical_share(runs: Sequence[BlockRun], plain: Sequence[BlockRun]) -> float:
    """Share of the requests whose output is that of the same prompt in `plain`."""
    return statistics.fmean(a.output_ids == b.output_ids for a, b in _pairs(runs, plain))


def match_rates(runs: Sequence[BlockRun]) -> list[float]:
    """Of each request that draft tokens were proposed for."""
    rates = (answer.match_rate for run in runs for answer in run.answers)
    return [rate for rate in rates if rate is not None]


def request_speedups(runs: Sequence[BlockRun], plain: Sequence[BlockRun]) -> list[float]:
    """Of each request: its seconds of service per token in `plain` over those in `runs`.

    Time in the queue is left out: it depends on the requests before it.
    """
    return [
        (other.service / other.tokens) / (one.service / one.tokens)
        for one, other in _pairs(runs, plain)
        if one.tokens and other.tokens
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _pairs(runs: Sequence[BlockRun], plain: Sequence[BlockRun]) -> list[tuple[Answer, Answer]]:
    return [
        pair
        for run, other in zip(runs, plain, strict=True)
        for pair in zip(run.answers, other.answers, strict=True)
    ]


def _tokens_per_s(runs: Sequence[BlockRun]) -> float:
    tokens = sum(answer.tokens for run in runs for answer in run.answers)
    return tokens / sum(run.seconds for run in runs)


def _drafted(runs: Sequence[BlockRun]) -> int | None:
    counts = [run.drafted for run in runs if run.drafted is not None]
    return sum(counts) if counts else None


def _by_source(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for source, number in count.items():
            total[source] = total.get(source, 0) + number
    return total


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
