"""Samples the target's tokens at the nodes of draft trees, and accepts draft tokens.

This module replaces SGLang's `eagle_sample` on every device. `eagle_sample` applies the penalties
of the root at all nodes of a tree. It combines filters in another way than plain decoding. For
sampled requests it needs the probabilities of the drafts. On a CPU it takes the argmax at any
temperature.

SGLang's kernel for greedy trees decides which draft tokens are accepted: it compares them with the
sampled tokens. The tests run this module on a CPU and on fake CUDA tensors, and
`gpu-check` runs it on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch.nn.functional import pad

from sglang_qspec.engine.passes.sample.penalties import penalize_trees
from sglang_qspec.engine.passes.sample.seeds import draws_of
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.sample import sample_targets

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_utils import GrammarMask
    from torch import Tensor

    from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput


def sample_and_accept(
    verify_input: TreeVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: GrammarMask | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token at each node, and accept draft tokens.

    Arguments and results are as in `sglang.srt.speculative.eagle_utils.eagle_sample`. Returns three
    int32 tensors: `predict` [bs * D] has the token after each row, `accept_lens` [bs] the
    number of accepted nodes with the root, and `accept_index` [bs, D] the accepted rows, then -1.
    All ranks of the target get those of rank 0. Penalties, bias and grammar change the logits in
    place.
    """
    info = batch.sampling_info
    width = verify_input.draft_token_num
    logits = logits_output.next_token_logits[: verify_input.rows]
    _shape_logits(logits, batch, verify_input, grammar_mask)
    if info.is_all_greedy:
        targets = likeliest(logits)
    else:
        temperatures = info.temperatures.flatten()[verify_input.owners]
        draws = draws_of(info, verify_input.positions, verify_input.owners)
        targets = sample_targets(logits, temperatures, draws)

    bs = len(batch.seq_lens)
    device = logits.device
    # The kernel expects tensors of bs * D elements, and uses the rows in `retrieve_index`.
    padded = pad(targets, (0, bs * width - len(targets)))
    predict = padded.to(torch.int32, copy=True)
    accept_index = torch.full(
        (bs, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device
    )
    correct = torch.empty(bs, dtype=torch.int32, device=device)
    verify_tree_greedy_func(
        predicts=predict,
        accept_index=accept_index,
        accept_token_num=correct,
        candidates=verify_input.draft_token.reshape(bs, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=padded.view(bs, width),
        topk=verify_input.tree_topk,
    )
    group = get_parallel().tp_group
    if group.world_size > 1:
        parts = (predict, correct, accept_index.flatten())
        chosen = group.broadcast(torch.cat(parts), src=0)
        predict, correct, accepted = chosen.split([len(part) for part in parts])
        accept_index = accepted.view(accept_index.shape)
    return predict, correct + 1, accept_index


def _shape_logits(
    logits: Tensor,
    batch: ScheduleBatch,
    verify_input: TreeVerifyInput,
    grammar_mask: GrammarMask | None,
) -> None:
    """Apply custom processors, penalties, bias and grammar to the logits in place, at each node.

    Each node gets the changes that plain decoding would make after the same tokens. A request with
    a custom processor has no drafts, so the processor applies to its root only.
    """
    info = batch.sampling_info
    if info.has_custom_logit_processor:
        roots = verify_input.retrieve_index[:, 0]
        processed = logits[roots]
        apply_custom_logit_processor(processed, info)
        logits[roots] = processed
    sanitize_nan_logits(logits, "verify: target model logits")
    token_ids = verify_input.draft_token.view(verify_input.retrieve_index.shape)
    penalize_trees(
        logits, batch.reqs, token_ids, verify_input.tree_mask, verify_input.retrieve_index
    )
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[verify_input.owners])
    if grammar_mask is not None:
        grammar_mask.apply(logits)
