"""The tokens that grammars allow at the nodes of draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_qspec.trie import DraftTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_utils import GrammarMask

    from sglang_qspec.engine.passes.verify_input import TreeVerifyInput


def grammar_mask(
    batch: ScheduleBatch, trees: DraftTrees, verify_input: TreeVerifyInput
) -> GrammarMask | None:
    """The mask of the rows of a pass over `trees`; None if no request has a grammar."""
    if not batch.has_grammar:
        return None
    layout = trees.lay_out()
    tree = GrammarTree.from_host(
        torch.from_numpy(layout.next_token),
        torch.from_numpy(layout.next_sibling),
        torch.from_numpy(trees.token_ids.astype(np.int64)),
    )
    mask = build_grammar_vocab_mask(
        reqs=batch.reqs,
        tree=tree,
        sampling_info=batch.sampling_info,
        device=verify_input.retrieve_next_token.device,
        barrier=None,
    )
    if mask is None or not trees.ragged:
        return mask
    nodes = verify_input.owners * trees.width + verify_input.offsets
    return mask._replace(vocab_mask=mask.vocab_mask[nodes])
