"""Settles passes: reads the outcome of a pass on the host, and commits its tokens.

Without the overlap scheduler the worker settles each pass at once. With the overlap scheduler the
pass still runs when the worker returns. Then the pass is settled when the next decode call begins,
or when SGLang processes its result, whichever is first. In both cases SGLang has processed the
results of all earlier passes.

The next pass needs the tokens, and the sidecar gets them at once. Statistics, labels and traces can
wait: SGLang processes the result of a pass behind the launch of the next one, and they are updated
then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import tracing
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.lineup import KnownLens, Lineup
from sglang_qspec.engine.passes.outcome import ComingTokens, Outcome, PlainOutcome
from sglang_qspec.engine.passes.outputs import outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.request_record import RequestRecord, record_of
from sglang_qspec.engine.passes.target_pass import EarlyPass, Pass


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
        self._settled: list[_Settled] = []
        """The settled passes that are not accounted for."""

    def add(self, launched: Pass) -> None:
        """Keep a launched pass until it is settled."""
        if launched.early is not None and self.last_early(launched.early.lineup) is not None:
            self._pending[0].outlasted = True
        self._pending.append(launched)

    def coming_lens(self, lineup: Lineup) -> KnownLens | None:
        """The lengths of the texts once all passes are settled; does not wait.

        None if the host cannot know them: a pass with drafts is not settled, or a request has
        ended or waits for tokens of its prefill.
        """
        last = self.last_early(lineup)
        if last is not None:
            return last.known.after
        if any(not isinstance(each.outcome, ComingTokens) for each in self._pending):
            return None
        reqs = lineup.reqs
        if any(req.finished() or record_of(req).prefill for req in reqs):
            return None
        coming = Counter(id(req) for each in self._pending for req in each.reqs)
        if any(coming[id(req)] > 1 for req in reqs):
            return None
        lens = lineup.prompt_lens + np.array(
            [
                len(output) - 1 + coming[id(req)]
                for req, output in zip(reqs, outputs_of(reqs), strict=True)
            ],
            np.int64,
        )
        return KnownLens(torch.from_numpy(lens), int(lens.sum()), in_place=False)

    def last_early(self, lineup: Lineup) -> EarlyPass | None:
        """The last pass, if it is an early one over the same requests, and all before are settled.

        SGLang has then processed all results before it, and none since, so no request has ended.
        """
        last = self._pending[0].early if len(self._pending) == 1 else None
        return last if last is not None and last.lineup is lineup else None

    def is_early(self, result: Any) -> bool:
        """Whether `result` is of an early pass that is not settled."""
        return any(each.result is result and each.early is not None for each in self._pending)

    def settle(self, *, processed: bool = False) -> None:
        """Settle all passes: read their outcomes, and commit the tokens. Waits for the device.

        SGLang adds the tokens to the outputs one pass late, or next if they are `processed`. What
        the next pass does not need follows with `account`, behind its launch.
        """
        self.account()
        pending, self._pending = self._pending, []
        outcomes = [self._settle(launched) for launched in pending]
        if pending and self._overlap:
            self._drop_unadded()
            if not processed:
                self._keep_unadded(pending, outcomes)
        if not self._overlap:
            self.account()

    def account(self) -> None:
        """Update the statistics, labels and traces of the settled passes."""
        settled, self._settled = self._settled, []
        for each in settled:
            self._account(each)

    def _drop_unadded(self) -> None:
        for record in self._unadded:
            record.unadded = None
        self._unadded.clear()

    def _keep_unadded(
        self, settled: Sequence[Pass], outcomes: Sequence[Outcome | PlainOutcome]
    ) -> None:
        """Keep the tokens that SGLang has not added to outputs."""
        for launched, outcome in zip(settled, outcomes, strict=True):
            for req, length, tokens in zip(
                launched.reqs, launched.output_lens, outcome.tokens, strict=True
            ):
                if _takes_tokens(req):
                    record = record_of(req)
                    record.unadded = length, tokens
                    self._unadded.append(record)

    def settle_through(self, result: Any) -> None:
        """Settle all passes up to the pass with this result, and account for them.

        If that pass is settled, only account for it.
        """
        if self._pending and self._pending[0].result is result and self._pending[0].is_plain_run:
            self._count(self._pending.pop(0))
            return
        for count, launched in enumerate(self._pending, 1):
            if launched.result is result:
                later = self._pending[count:]
                del self._pending[count:]
                self.settle(processed=True)
                self._pending = later
                if launched.is_prefill and later and self._accounting is not None:
                    self._accounting.restart()
                break
        self.account()

    def _count(self, launched: Pass) -> None:
        """Settle a pass of a run: count it, and leave its tokens to SGLang."""
        assert isinstance(launched.outcome, ComingTokens)
        assert launched.early is not None
        if launched.proposal is not None and self._accounting and speculation.active() is not None:
            launched.outcome.wait()
            with guarded("counting a pass"):
                self._accounting.count_plain(
                    launched.early.lineup.rids, launched.pipeline, launched.proposal
                )

    def _settle(self, launched: Pass) -> Outcome | PlainOutcome:
        assert launched.outcome is not None
        outcome = launched.outcome.read()
        if launched.states is not None and (active := speculation.active()) is not None:
            with guarded("sending hidden states"):
                found = launched.states.read(outcome.accepted_nodes)
                for req, (begin, states) in zip(launched.reqs, found, strict=True):
                    active.show_states(req.rid, begin, states)
        if isinstance(outcome, Outcome) and not launched.is_prefill:
            self._improve_guesses(launched, outcome)
        if not launched.is_prefill or launched.proposal is not None:
            self._settled.append(self._commit(launched, outcome))
        return outcome

    def _improve_guesses(self, launched: Pass, outcome: Outcome) -> None:
        active, trees = speculation.active(), launched.trees
        if active is not None and active.jacobi is not None and trees is not None:
            with guarded("improving guesses"):
                rids = [req.rid for req in launched.reqs]
                active.jacobi.improve(rids, launched.output_lens, trees, outcome.predict)

    def _commit(self, launched: Pass, outcome: Outcome | PlainOutcome) -> _Settled:
        """Commit the tokens of a pass, except for requests that drop them.

        A request drops the tokens of a prefill if further chunks of its prompt follow. With the
        overlap scheduler, a request also drops the tokens of a pass if the pass before has ended
        the request.
        """
        accepted, bonus_ids = outcome.accepted_nodes, outcome.bonus_ids
        reqs, lens = launched.reqs, launched.output_lens
        proposal = launched.proposal
        whole = None if proposal is None else proposal.trees
        rids = None if launched.early is None else launched.early.lineup.rids
        drops = (self._overlap or launched.is_prefill) and not launched.outlasted
        rows = [row for row, req in enumerate(reqs) if _takes_tokens(req)] if drops else []
        if drops and len(rows) < len(reqs):
            reqs, lens, rids = [reqs[row] for row in rows], [lens[row] for row in rows], None
            accepted, bonus_ids = [accepted[row] for row in rows], [bonus_ids[row] for row in rows]
            proposal = None if proposal is None else proposal.take(rows)
        if rids is None:
            rids = [req.rid for req in reqs]
        settled = _Settled(launched, reqs, rids, lens, proposal, accepted, bonus_ids)
        if launched.traced is not None:
            launched.traced.end()
        if proposal is not None and self._accounting and speculation.active() is not None:
            with guarded("committing the tokens of a pass"):
                if launched.is_prefill:
                    self._accounting.record_prefill(settled.rids, proposal, accepted, bonus_ids)
                else:
                    settled.lost = self._accounting.commit(
                        settled.rids, launched.pipeline, proposal, accepted, bonus_ids, whole=whole
                    )
        return settled

    def _account(self, settled: _Settled) -> None:
        launched, reqs, proposal = settled.launched, settled.reqs, settled.proposal
        accepted = settled.accepted
        if proposal is not None and self._accounting and speculation.active() is not None:
            with guarded("updating acceptance statistics"):
                if not launched.is_prefill:
                    self._accounting.account(
                        settled.rids, proposal, accepted, settled.bonus_ids, settled.lost
                    )
        if launched.early is not None and not launched.early.lineup.has_records:
            return
        with guarded("recording token provenance"):
            trees = None if proposal is None else proposal.trees
            whole = launched.proposal
            provenance.record(reqs, trees, accepted, settled.output_lens)
            if launched.is_prefill:
                tracing.extend(reqs, settled.output_lens, accepted)
            elif launched.traced is not None:
                launched.traced.record(
                    reqs,
                    trees,
                    accepted,
                    settled.output_lens,
                    pipeline=launched.pipeline,
                    batch_requests=len(launched.reqs),
                    batch_rows=len(launched.reqs) if whole is None else whole.trees.rows,
                )


@dataclass
class _Settled:
    """A settled pass of the requests that take its tokens."""

    launched: Pass
    reqs: Sequence[Any]
    rids: Sequence[str]
    """The ids of `reqs`; the same list for all early passes of a lineup that lose no request."""
    output_lens: Sequence[int]
    """Output length of each request before the pass, in tokens."""
    proposal: Proposal | None
    accepted: Sequence[Sequence[int]]
    """The accepted nodes of each tree, in order."""
    bonus_ids: Sequence[int]
    """The target's own token of each request."""
    lost: float = 0.0
    """Seconds that the pass lost to a sidecar on its device."""


def _takes_tokens(req: Any) -> bool:
    """Whether SGLang will add the tokens of the pass to the request's output."""
    return not (req.finished() or req.is_retracted or req.inflight_middle_chunks > 0)
