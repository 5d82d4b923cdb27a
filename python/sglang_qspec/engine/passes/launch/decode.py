"""Proposes the drafts of SGLang's decode batches, and waits for step drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.outputs import outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PipelinePlan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def propose(
    proposer: Proposer, active: Speculator, batch: ScheduleBatch, plan: PipelinePlan
) -> Proposal:
    """Choose a tree for each request of the batch, and wait as long as `proposer` asks for it.

    A draft that enlarges no tree does not prolong the wait, so the sidecar cannot delay a pass
    without end.
    """
    rids = [req.rid for req in batch.reqs]
    drafts = not _needs_plain_decode(batch)
    proposing = proposer.propose(rids, outputs_of(batch.reqs), plan, drafts=drafts)
    try:
        seconds = next(proposing)
        while True:
            seconds = proposing.send(active.wait_for_steps(seconds))
    except StopIteration as end:
        proposal: Proposal = end.value
        return proposal


def _needs_plain_decode(batch: ScheduleBatch) -> bool:
    """Whether the batch has images or watermarks, which a verify pass would ignore.

    Only SGLang's decode pass computes the positions of images, and adds watermarks.
    """
    has_images = any(req.multimodal_inputs is not None for req in batch.reqs)
    return bool(batch.sampling_info.has_watermark_candidates or has_images)
