"""The sgl_kernel functions that SGLang's CPU platform imports, in torch.

SGLang's call sites define names, argument order and in-place effects. So most functions return
nothing and write to the tensors marked "out". `req_to_token` int32 [requests, pool_len] has one row
per request with the KV slot of each position. Index tensors may be int32 or int64.
"""

import ctypes
from itertools import chain

import torch
from torch import Tensor

from sglang_qspec.cpu.tree_links import (
    links_from_parents,
    mask_from_parents,
    parents_from_mask,
)
from sglang_qspec.verify.accept import accept
from sglang_qspec.verify.seeded import murmur_hash32

_FULL_MASK, _QLEN_ONLY = 0, 1


def _window(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column in `req_to_token` of the positions [start, end) of each request, in order."""
    lens = (end - start).long()
    before = lens.cumsum(0) - lens
    owner = torch.repeat_interleave(lens)
    column = torch.arange(owner.numel()) - before[owner] + start.long()[owner]
    return rows.long()[owner], column


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write the new KV slots, packed in `out_cache_loc`, into the rows of `req_to_token` (out)."""
    row, column = _window(req_pool_indices, start_offset, end_offset)
    req_to_token[row, column] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Pack the KV slots of positions [start, end) of each request into `out_cache_loc` (out)."""
    row, column = _window(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: row.numel()] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Pack `topk * num_steps` slots per request, from `seq_lens` on, into `out_cache_loc` (out)."""
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Copy the accepted entries of `out_cache_loc` to the front of `accept_out_cache_loc` (out)."""
    taken = accept_index.flatten()
    taken = taken[taken >= 0].long()
    accept_out_cache_loc[: taken.numel()] = out_cache_loc[taken].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Copy each request's last accepted token into `bonus_tokens` (out)."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: last.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy KV slots `src_loc` to `tgt_loc` in every buffer; source and target may overlap.

    `data_ptrs` uint64 [buffers] are addresses, and `strides` are the bytes per slot of each buffer.
    """
    if tgt_loc.numel() == 0:
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    target, source = tgt_loc.long(), src_loc.long()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_char * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions and links (out) of the NGRAM draft trees from their ancestor mask.

    `tree_mask` is bool [bs * D * D]. The four outputs are int64 with bs * D entries.
    """
    shape = (batch_size, draft_token_num)
    mask = tree_mask.view(*shape, draft_token_num).bool()
    next_token, next_sibling = links_from_parents(parents_from_mask(mask))
    depths = mask.tril(-1).sum(2)
    positions.view(shape).copy_(depths + verified_seq_len.long().unsqueeze(1))
    retrieve_index.view(shape).copy_(torch.arange(batch_size * draft_token_num).view(shape))
    retrieve_next_token.view(shape).copy_(next_token)
    retrieve_next_sibling.view(shape).copy_(next_sibling)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build the EAGLE draft trees (out: mask, positions, links) from the selected tokens.

    `selected_index` [bs, D - 1] are indices into the drafter's concatenated score lists of `topk`
    tokens. `parent_list` has, for each list, the index of the token that the list continues; list
    0 continues the root. The mask is flattened: [bs, D, seq_len + D] if full, with its prefix part
    already filled, or [bs, D, D]. Raises NotImplementedError for other mask modes.
    """
    if int(tree_mask_mode) not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(f"no CPU kernel exists for tree mask mode {int(tree_mask_mode)}")
    bs = verified_seq_len.numel()
    lists = selected_index.long() // topk
    origin = parent_list.view(bs, -1).long().gather(1, lists)
    is_parent = origin.unsqueeze(2) == selected_index.long().unsqueeze(1)
    found, place = is_parent.to(torch.uint8).max(2)
    own = torch.arange(1, draft_token_num)
    grown = torch.where(lists == 0, 0, torch.where(found > 0, place + 1, own))
    parents = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), grown], dim=1)

    mask = mask_from_parents(parents)
    seq_lens = verified_seq_len.long()
    rows = torch.arange(draft_token_num)
    if int(tree_mask_mode) == _QLEN_ONLY:
        tree_mask.view(-1)[: mask.numel()] = mask.flatten().to(tree_mask.dtype)
    else:
        before = (seq_lens.cumsum(0) - seq_lens) * draft_token_num
        start = before + draft_token_num**2 * torch.arange(bs)
        line = rows * (seq_lens + draft_token_num).unsqueeze(1) + seq_lens.unsqueeze(1)
        index = start.view(-1, 1, 1) + line.unsqueeze(2) + rows
        tree_mask.view(-1)[index] = mask.to(tree_mask.dtype)
    next_token, next_sibling = links_from_parents(parents)
    positions.view(bs, -1).copy_(mask.sum(2) - 1 + seq_lens.unsqueeze(1))
    retrieve_index.view(bs, -1).copy_(torch.arange(bs * draft_token_num).view(bs, -1))
    retrieve_next_token.view(bs, -1).copy_(next_token)
    retrieve_next_sibling.view(bs, -1).copy_(next_sibling)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the path of every tree that agrees with the target's tokens.

    `candidates`, the `retrive_*` (SGLang's spelling) and `target_predict` are [bs, D].
    `retrive_index` is the place of each node in the flat `target_predict` and in `predicts`.
    `accept_index` [bs, S] (out) gets the places of the accepted nodes, padded with -1. `predicts`
    [bs * D] (out) gets the target's tokens at these places. `accept_token_num` [bs] (out) gets the
    number of accepted draft tokens, without the bonus token.
    """
    # With few numbers per request, lists take a tenth of the time of tensors.
    targets, places = target_predict.flatten()[retrive_index].tolist(), retrive_index.tolist()
    tokens, longest = candidates.tolist(), accept_index.shape[1]
    links = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    paths = accept(tokens, *links, targets, longest)
    accepted = [[places[row][node] for node in path] for row, path in enumerate(paths)]
    drawn = [targets[row][node] for row, path in enumerate(paths) for node in path]
    padded = [found + [-1] * (longest - len(found)) for found in accepted]
    accept_index.copy_(torch.tensor(padded, dtype=torch.long).view_as(accept_index))
    predicts[list(chain.from_iterable(accepted))] = torch.tensor(drawn, dtype=predicts.dtype)
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in paths]))


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one, in place, and append its new token `topk_index`.

    With `select_index` [bs], the new token goes to this flat index instead of the end.
    """
    start, lens = extend_start_loc.long(), extend_seq_lens.long()
    zero = torch.zeros_like(lens)
    request, offset = _window(torch.arange(lens.numel()), zero, (lens - 1).clamp(min=0))
    place = start[request] + offset
    input_ids[place] = input_ids[place + 1]
    last = start + lens - 1 if select_index is None else select_index.long()
    present = lens > 0
    input_ids[last[present]] = topk_index.flatten()[present].to(input_ids.dtype)


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Hash each pair of `seed` and `positions` [n] with each column [m]: uint32 [n, m]."""
    return murmur_hash32(seed, positions, col_indices).to(torch.uint32)
