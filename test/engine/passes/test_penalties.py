"""Penalties read from the output equal those that SGLang's penalizers add up token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_qspec.engine.passes.sample.penalties import penalize_trees, read_outputs
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from test.engine.passes import toy
from test.engine.passes.toy import FIRST, STOP, VOCAB, Batch, Request

PARAMS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.3, "presence_penalty": -0.4},
    {"repetition_penalty": 1.7},
    {},
    {"frequency_penalty": 1.1, "repetition_penalty": 0.6, "min_new_tokens": 4},
    {"min_new_tokens": 9},
]
OUTPUTS = [[2, 2, 5], [], [1], [3, 1], [4, 4, 4, 1, 0]]
TOKENS, PARENTS = (0, 4, STOP, 1, 4), (0, 0, 0, 1, 3)


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with toy.engine():
        yield


def requests() -> list[Request]:
    return [Request({"temperature": 1.0, **params}, n) for n, params in enumerate(PARAMS)]


def logits_of(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def added_up(logits: Tensor, after_first: Sequence[Sequence[int]]) -> Tensor:
    """`logits` [bs, V] with SGLang's penalties for requests with output FIRST and `after_first`.

    Outputs in a batch of SGLang have one length, so each request has its own batch here.
    """
    rows = []
    for number, tokens in enumerate(after_first):
        batch = Batch(requests()[number : number + 1])
        batch.cumulate_penalty_output_tokens()
        for token in tokens:
            batch.reqs[0].output_ids.append(token)
            batch.cumulate_penalty_output_tokens()
        row = logits[number : number + 1].clone()
        with batch.forward():
            batch.sampling_info.apply_logits_bias(row)
        rows.append(row)
    return torch.cat(rows)


def test_a_plain_pass_over_retracted_requests_has_the_penalties_of_their_whole_output() -> None:
    """The batch is new, so SGLang's own penalizers have counted no token."""
    reqs = requests()
    for req, tokens in zip(reqs, OUTPUTS, strict=True):
        req.output_ids += tokens
    batch, logits = Batch(reqs), logits_of(len(PARAMS))
    expected = added_up(logits, OUTPUTS)
    with batch.forward():
        read_outputs(batch)
        batch.sampling_info.apply_logits_bias(logits)
    assert torch.allclose(logits, expected, atol=1e-6)


def test_a_batch_without_penalties_gets_no_penalizer() -> None:
    batch = Batch([Request({"temperature": 1.0}, 0)])
    with batch.forward():
        read_outputs(batch)
        assert batch.sampling_info.penalizer_orchestrator is None


def test_every_node_has_the_penalties_of_plain_decoding_after_its_path() -> None:
    reqs, width = requests(), len(TOKENS)
    for req, tokens in zip(reqs, OUTPUTS, strict=True):
        req.output_ids += tokens
    scores = tuple(1 / (1 + node) for node in range(width))
    tree = DraftTree(TOKENS, PARENTS, (Source.STEP,) * width, scores)
    trees = DraftTrees.of([tree] * len(reqs), width)
    logits = logits_of(len(reqs) * width)
    paths = [[], [4], [STOP], [4, 1], [4, 1, 4]]
    expected = torch.stack(
        [
            added_up(logits[node::width], [output + path for output in OUTPUTS])
            for node, path in enumerate(paths)
        ],
        1,
    )
    token_ids = torch.from_numpy(trees.token_ids).long()
    rows = torch.arange(len(logits)).view(token_ids.shape)
    penalize_trees(logits, reqs, token_ids, torch.from_numpy(trees.lay_out().mask), rows)
    assert TOKENS[0] == FIRST
    assert torch.allclose(logits.view_as(expected), expected, atol=1e-6)


def test_stop_tokens_that_the_model_does_not_have_are_ignored() -> None:
    params = {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": [2]}
    usual, odd = Request(params, 0), Request(params, 0)
    odd.sampling_params.stop_token_ids = {2, -1, VOCAB, 1 << 40}
    found = []
    for req in (usual, odd):
        logits, rows = logits_of(1), torch.zeros(1, 1, dtype=torch.int64)
        penalize_trees(logits, [req], rows, torch.ones(1, 1, 1, dtype=torch.bool), rows)
        found.append(logits)
    assert torch.equal(*found)
    assert found[0].isinf().sum() > 1
