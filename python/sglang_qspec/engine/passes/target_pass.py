"""One pass of the target on this rank, from its decision to its settlement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_qspec.engine.passes.lineup import KnownLens, Lineup
from sglang_qspec.engine.passes.outcome import ComingOutcome, ComingTokens
from sglang_qspec.engine.passes.outputs import outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.states import ComingStates
from sglang_qspec.engine.passes.tracing import PassTrace
from sglang_qspec.engine.ranks import PassOrder
from sglang_qspec.trie import DraftTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class EarlyPass(NamedTuple):
    """What the host knows of a pass that it launches before it knows the last pass's tokens."""

    lineup: Lineup
    """The requests of the pass."""
    known: KnownLens
    """The lengths of the texts before the pass, which the requests do not have yet."""


@dataclass
class Pass:
    """A decode pass or a prefill.

    `Leader` decides it on rank 0, `Launcher` runs it, and `Settlement` reads its outcome.
    """

    batch: ScheduleBatch
    """The requests of the pass. SGLang changes the batch once the pass is launched."""
    order: PassOrder = field(default_factory=PassOrder)
    """What all ranks run."""
    pipeline: str = ""
    """Pipeline of a decode pass; empty for a prefill."""
    proposal: Proposal | None = None
    """Drafts of the pass; None on ranks after rank 0, for a prefill without drafts, and after
    speculation has ended."""
    traced: PassTrace | None = None
    """Trace of a decode pass; None if no request asks for it."""
    outcome: ComingOutcome | ComingTokens | None = None
    """The tokens of the pass, once it is launched; the host may not have read them."""
    states: ComingStates | None = None
    """The target's hidden states for a head; None without one."""
    result: Any = None
    """What the worker returns to SGLang for the pass, once it is launched."""
    early: EarlyPass | None = None
    """What the host knew before an early pass; None for other passes."""
    outlasted: bool = False
    """Whether an early pass over the same requests was launched behind this one, so that the pass
    before has ended none of them."""

    def __post_init__(self) -> None:
        self.reqs: Sequence[Any] = self.batch.reqs
        """SGLang's requests, one for each tree of the pass."""
        if self.early is None:
            self.output_lens = list(map(len, outputs_of(self.reqs)))

    @cached_property
    def output_lens(self) -> Sequence[int]:
        """Output length of each request before the pass, in tokens."""
        assert self.early is not None
        seq_lens = self.early.known.seq_lens.numpy()
        lens: list[int] = (seq_lens + 1 - self.early.lineup.prompt_lens).tolist()
        return lens

    @property
    def begins(self) -> list[int]:
        """Position of the first row of each request in its text, in a decode pass."""
        return [
            len(req.origin_input_ids) + length - 1
            for req, length in zip(self.reqs, self.output_lens, strict=True)
        ]

    @property
    def is_plain_run(self) -> bool:
        """Whether the pass is early, and the host needs none of its tokens before the next pass.

        It is followed by an early pass over the same requests, so it drops no token. Neither a
        sidecar nor a record of a request reads its tokens.
        """
        return (
            self.outlasted
            and self.early is not None
            and not self.early.lineup.has_records
            and (self.proposal is None or self.proposal.unread)
        )

    @property
    def trees(self) -> DraftTrees | None:
        """The trees that all ranks verify; None for a pass without drafts."""
        return self.order.trees

    @property
    def is_prefill(self) -> bool:
        """Whether the pass is a prefill. A prefill without drafts updates no statistics."""
        return not self.pipeline
