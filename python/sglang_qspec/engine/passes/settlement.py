"""Settles passes: reads the outcome of a pass on the host; updates statistics, labels and traces.

Without the overlap scheduler the worker settles each pass at once. With the overlap scheduler the
pass still runs when the worker returns. Then the pass is settled when the next decode call begins,
or when SGLang processes its result, whichever is first. In both cases SGLang has processed the
results of all earlier passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import tracing
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.outcome import ComingTokens, Outcome, PlainOutcome
from sglang_qspec.engine.passes.outputs import outputs_of
from sglang_qspec.engine.passes.request_record import RequestRecord, record_of
from sglang_qspec.engine.passes.target_pass import Pass


class Settlement:
    """Owns the passes that are not settled, in the order in which they were launched."""

    def __init__(self, accounting: PassAccounting | None, *, overlap: bool) -> None:
        """`accounting` is None on ranks after rank 0.

        With `overlap` SGLang adds the tokens of a pass to the outputs one pass late.
        """
        self._accounting = accounting
        self._overlap = overlap
        self._pending: list[Pass] = []
        self._unadded: list[RequestRecord] = []
        """The records with tokens of the last settled passes."""

    def add(self, launched: Pass) -> None:
        """Keep a launched pass until it is settled."""
        self._pending.append(launched)

    def coming_lens(self, reqs: Sequence[Any]) -> list[int] | None:
        """The output length of each request once all passes are settled; does not wait.

        None if the host cannot know them: a pass with drafts is not settled, or a request has
        ended or waits for tokens of its prefill.
        """
        if any(not isinstance(each.outcome, ComingTokens) for each in self._pending):
            return None
        coming = Counter(id(req) for each in self._pending for req in each.reqs)
        if any(coming[id(req)] > 1 or record_of(req).prefill or req.finished() for req in reqs):
            return None
        return [
            len(output) + coming[id(req)]
            for req, output in zip(reqs, outputs_of(reqs), strict=True)
        ]

    def settle(self) -> None:
        """Settle all passes. Waits for the device."""
        pending, self._pending = self._pending, []
        outcomes = [self._settle(launched) for launched in pending]
        if pending and self._overlap:
            self._keep_unadded(pending, outcomes)

    def _keep_unadded(
        self, settled: Sequence[Pass], outcomes: Sequence[Outcome | PlainOutcome]
    ) -> None:
        """Keep the tokens that SGLang has not added to outputs; drop those of earlier passes."""
        for record in self._unadded:
            record.unadded = None
        self._unadded.clear()
        for launched, outcome in zip(settled, outcomes, strict=True):
            for req, length, tokens in zip(
                launched.reqs, launched.output_lens, outcome.tokens, strict=True
            ):
                if _takes_tokens(req):
                    record = record_of(req)
                    record.unadded = length, tokens
                    self._unadded.append(record)

    def settle_through(self, result: Any) -> None:
        """Settle all passes up to the pass with this result; do nothing if that pass is settled."""
        for count, launched in enumerate(self._pending, 1):
            if launched.result is result:
                later = self._pending[count:]
                del self._pending[count:]
                self.settle()
                self._pending = later
                if launched.is_prefill and later and self._accounting is not None:
                    self._accounting.restart()
                return

    def _settle(self, launched: Pass) -> Outcome | PlainOutcome:
        assert launched.outcome is not None
        outcome = launched.outcome.read()
        if not launched.is_prefill or launched.proposal is not None:
            self._record(launched, outcome)
        return outcome

    def _record(self, launched: Pass, outcome: Outcome | PlainOutcome) -> None:
        """Record the outcome of a pass, except for requests that drop the tokens of the pass.

        A request drops the tokens of a prefill if further chunks of its prompt follow. With the
        overlap scheduler, a request also drops the tokens of a pass if the pass before has ended
        the request.
        """
        accepted, bonus_ids = outcome.accepted_nodes, outcome.bonus_ids
        reqs, lens = launched.reqs, launched.output_lens
        proposal = launched.proposal
        whole = None if proposal is None else proposal.trees
        drops = self._overlap or launched.is_prefill
        if drops and not all(map(_takes_tokens, reqs)):
            rows = [row for row, req in enumerate(reqs) if _takes_tokens(req)]
            reqs, lens = [reqs[row] for row in rows], [lens[row] for row in rows]
            accepted, bonus_ids = [accepted[row] for row in rows], [bonus_ids[row] for row in rows]
            proposal = None if proposal is None else proposal.take(rows)
        if proposal is not None and self._accounting and speculation.active() is not None:
            rids = [req.rid for req in reqs]
            with guarded("updating acceptance statistics"):
                if launched.is_prefill:
                    self._accounting.record_prefill(rids, proposal, accepted, bonus_ids)
                else:
                    self._accounting.record(
                        rids, launched.pipeline, proposal, accepted, bonus_ids, whole=whole
                    )
        with guarded("recording token provenance"):
            trees = None if proposal is None else proposal.trees
            provenance.record(reqs, trees, accepted, lens)
            if launched.is_prefill:
                tracing.extend(reqs, lens, accepted)
            elif launched.traced is not None:
                launched.traced.record(
                    reqs,
                    trees,
                    accepted,
                    lens,
                    pipeline=launched.pipeline,
                    batch_requests=len(launched.reqs),
                    batch_rows=len(launched.reqs) if whole is None else whole.rows,
                )


def _takes_tokens(req: Any) -> bool:
    """Whether SGLang will add the tokens of the pass to the request's output."""
    return not (req.finished() or req.is_retracted or req.inflight_middle_chunks > 0)
