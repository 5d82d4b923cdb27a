"""The tokens that grammars allow at the nodes of draft trees.

SGLang's own walk over a tree expects masks of packed bits and grammars that can take back a token.
The grammars of outlines have neither. With a reasoning parser SGLang looks for functions at the
backend that only xgrammar's has. An error of a grammar ends only its request, as an error after the
pass does in SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.speculative.spec_utils import GrammarMask

from sglang_qspec.trie import DraftTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput

logger = logging.getLogger(__name__)


def install(backend: str) -> None:
    """Prepare SGLang's grammar backend, the value of `--grammar-backend`, for walks over trees."""
    for name in ("allocate_vocab_mask", "move_vocab_mask", "apply_vocab_mask"):
        if not hasattr(BaseGrammarBackend, name):
            # Never called: a request with a grammar uses the grammar's own.
            setattr(BaseGrammarBackend, name, None)
    if backend != "outlines":
        return
    # Only this backend needs the package `outlines`.
    from sglang.srt.constrained.outlines_backend import OutlinesGrammar

    if "rollback" in vars(OutlinesGrammar):
        return
    accept_without = OutlinesGrammar.accept_token

    def accept_token(grammar: Any, token: int) -> None:
        vars(grammar).setdefault("_states", []).append(grammar.state)
        accept_without(grammar, token)

    def rollback(grammar: Any, k: int) -> None:
        for _ in range(k):
            grammar.state = grammar._states.pop()

    OutlinesGrammar.accept_token, OutlinesGrammar.rollback = accept_token, rollback


def grammar_mask(
    batch: ScheduleBatch, trees: DraftTrees, verify_input: TreeVerifyInput
) -> GrammarMask | None:
    """The mask of the rows of a pass over `trees`; None if no request has a grammar."""
    if not batch.has_grammar:
        return None
    constrained = [(row, req) for row, req in enumerate(batch.reqs) if req.grammar is not None]
    if not constrained:  # the grammars have failed
        return None
    info = batch.sampling_info
    any_grammar = constrained[0][1].grammar
    mask = any_grammar.allocate_vocab_mask(info.vocab_size, trees.token_ids.size, "cpu")
    for row, req in constrained:
        nodes = slice(row * trees.width, row * trees.width + int(trees.sizes[row]))
        try:
            fill_tree(req.grammar, mask[nodes], trees[row].token_ids, trees[row].parents)
        except Exception as error:
            logger.exception("The grammar of request %s failed in a verify pass", req.rid)
            _abort(req, error)
    info.grammar_mask = None  # otherwise the mask of the prefill would apply too
    mask = mask.to(verify_input.retrieve_next_token.device, non_blocking=True)
    if trees.ragged:
        mask = mask[verify_input.owners * trees.width + verify_input.offsets]
    return GrammarMask(any_grammar, mask)


def fill_tree(
    grammar: Any, mask: torch.Tensor, token_ids: Sequence[int], parents: Sequence[int]
) -> None:
    """Fill the rows of the nodes that the grammar allows; the state of the grammar stays.

    `mask` [N, W] has a row for each node of the tree and allows all tokens at first: int32 has a
    bit for each allowed token, bool is true for each forbidden token.
    """
    is_dense = mask.dtype == torch.bool
    rows = mask.numpy()
    children: list[list[int]] = [[] for _ in token_ids]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)

    def visit(node: int) -> None:
        if grammar.is_terminated():
            return
        grammar.fill_vocab_mask(mask, node)
        for child in children[node]:
            token_id = token_ids[child]
            if is_dense:
                allowed = not rows[node, token_id]
            else:
                allowed = rows[node, token_id // 32] >> token_id % 32 & 1
            if allowed:
                grammar.accept_token(token_id)
                visit(child)
                grammar.rollback(1)

    visit(0)


def _abort(req: Any, error: Exception) -> None:
    """End a request whose grammar has failed; the other requests of the pass go on."""
    req.grammar = None
    req.to_finish = FINISH_ABORT(
        f"The grammar failed: {error}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    )
