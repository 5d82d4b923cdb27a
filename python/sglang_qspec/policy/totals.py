"""Counts of draft tokens and target passes since the server started, over all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_qspec.config import PIPELINES
from sglang_qspec.draft_source import OF_STEPS
from sglang_qspec.policy.answer_kind import AnswerKind
from sglang_qspec.policy.draft_trials import DraftTrials
from sglang_qspec.policy.positions import Positions
from sglang_qspec.policy.request_lengths import RequestLengths
from sglang_qspec.trie import DraftTrees, Source

MEMORY = 0.02
"""Weight of one judged step-draft token in the moving average `Totals.agreement`."""
FIRST_AGREEMENT = {
    AnswerKind.GREEDY: 0.9,
    AnswerKind.SAMPLED: 0.8,
    AnswerKind.GRAMMAR: 0.6,
    AnswerKind.GUESSED: 0.9,
    AnswerKind.MIXED: 0.9,
}
"""Initial values of `Totals.agreement`. The draws of two models differ where their likeliest tokens
are the same, and a drafter knows no grammar."""


@dataclass
class PassTotals:
    """Decode and verify passes of the target in one pipeline."""

    passes: int = 0
    """Number of passes."""
    requests: int = 0
    """Batch sizes, summed over the passes."""
    input_tokens: int = 0
    """Input tokens, including drafts and padding, summed over the passes."""
    seconds: float = 0.0
    """Seconds between the ends of successive passes, without waits for drafts. The first pass after
    a prefill counts from its own start."""
    waited_seconds: float = 0.0
    """Seconds that the target waited for step drafts."""


class Totals:
    """Counts draft tokens by source and passes by pipeline, and averages step-draft agreement."""

    def __init__(self) -> None:
        self.proposed = dict.fromkeys(Source, 0)
        """Draft tokens that the target verified."""
        self.accepted = dict.fromkeys(Source, 0)
        """Draft tokens that became output."""
        self.positions = Positions()
        self.pipelines = {name: PassTotals() for name in ("queue", *PIPELINES)}
        self.pipeline = "none"
        """Pipeline of the latest decoding round; `none` before the first."""
        self.target_cpus = 0
        """Number of CPUs of the target in the latest decoding round; 0 if QSPEC does not divide
        them."""
        self.target_slowdown: float | None = None
        """Time of a plain pass while the sidecar drafts over its time while it does not, where both
        share a device; None if they do not, or if it is not measured yet."""
        self.lengths = RequestLengths()
        """Lengths of recent prompts and answers."""
        self.trials = DraftTrials()
        """What drafts are worth, as measured."""
        self.eager_passes = 0
        """Passes that ran without a CUDA graph; on a CPU, or with graphs disabled, all passes."""
        self.early_passes = 0
        """Passes that were launched before the host knew the tokens of the last pass."""
        self.kind = AnswerKind.MIXED
        """Kind of the batch of the latest decoding round."""
        self._agreements = dict(FIRST_AGREEMENT)
        """Values of `agreement` by kind."""

    @property
    def agreement(self) -> float:
        """Moving average for batches of the present kind: the fraction of step-draft tokens that
        are right after a right prefix."""
        return self._agreements[self.kind]

    def record(self, trees: DraftTrees, accepted: Sequence[Sequence[int]]) -> None:
        """Count one verify pass over `trees`; `accepted` has the accepted nodes of each tree."""
        for source, count in trees.count_by_source().items():
            self.proposed[source] += count
        self.positions.record(trees, accepted)
        steps = trees.steps
        steps[:, :1] = False  # the root is committed, wherever it came from
        for row, drafted in enumerate(steps.sum(axis=1).tolist()):
            confirmed = 0
            for node in accepted[row]:
                source = Source(trees.sources[row, node])
                self.accepted[source] += 1
                confirmed += source in OF_STEPS
            if drafted:
                self.learn_agreement(confirmed, missed=confirmed < drafted)

    def take_back(self, sources: Sequence[Source]) -> None:
        """Subtract accepted tokens after the end of an output; `sources` has the source of each."""
        for source in sources:
            self.accepted[source] -= 1

    def note_pass(
        self, pipeline: str, requests: int, input_tokens: int, seconds: float, waited: float
    ) -> None:
        """Count one decode pass; `seconds` excludes the `waited` seconds for drafts."""
        totals = self.pipelines[pipeline]
        totals.passes += 1
        totals.requests += requests
        totals.input_tokens += input_tokens
        totals.seconds += seconds
        totals.waited_seconds += waited

    def describe(self) -> dict[str, Any]:
        """Counts for /server_info and /metrics."""
        return {
            "proposed_tokens": {source.name.lower(): n for source, n in self.proposed.items()},
            "accepted_tokens": {source.name.lower(): n for source, n in self.accepted.items()},
            "positions": self.positions.describe(),
            "eager_passes": self.eager_passes,
            "early_passes": self.early_passes,
            "answer_kind": self.kind.value,
            "step_agreement": self.agreement,
            "target_cpus": self.target_cpus,
            "target_slowdown": self.target_slowdown,
            "draft_trials": self.trials.describe(),
            "pipeline": self.pipeline,
            "pipelines": {name: asdict(totals) for name, totals in self.pipelines.items()},
        }

    def learn_agreement(self, confirmed: int, *, missed: bool) -> None:
        """Update `agreement` with `confirmed` right tokens, and with a wrong token if `missed`."""
        weight = MEMORY * (confirmed + missed)
        share = confirmed / (confirmed + missed)
        self._agreements[self.kind] += min(weight, 1.0) * (share - self.agreement)
