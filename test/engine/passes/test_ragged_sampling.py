"""A ragged pass samples and accepts the same tokens as a pass of one width over the same trees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.logprob_processor import compute_spec_logprobs

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.outcome import ComingOutcome
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.requests.step_proposals import StepProposals
from sglang_qspec.messages import Candidates, Drafted
from sglang_qspec.trie import DraftTrees, Source
from test.engine.passes import toy
from test.engine.passes.toy import VOCAB, Batch, Request

PARENTS = (0, 0, 0, 1, 1, 2, 3)
MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 3.0, "top_k": 4, "top_p": 0.9},
    {"temperature": 0.3, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {"2": 1.5}},
    {"temperature": 1.0, "min_new_tokens": 4, "presence_penalty": -0.5},
]


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with toy.engine():
        sampling_seeds.install()
        yield


def trees_of(count: int) -> DraftTrees:
    """Trees of all first and second tokens, each cut to its own length."""
    drawn = np.random.default_rng(4)
    shape = (count, len(PARENTS))
    token_ids = np.zeros(shape, np.int32)
    for row in range(count):
        first, second, third = (drawn.permutation(VOCAB) for _ in range(3))
        token_ids[row, 1:] = *first[:2], *second[:2], third[0], third[1]
    whole = DraftTrees(
        token_ids,
        np.broadcast_to(np.array(PARENTS, np.int32), shape).copy(),
        np.full(shape, Source.STEP, np.uint8),
        np.broadcast_to(1 / np.arange(1, 1 + len(PARENTS)), shape).astype(np.float32),
        np.full(count, len(PARENTS), np.int32),
    )
    return whole.cut(1 + drawn.integers(0, len(PARENTS), count))


def accept(
    trees: DraftTrees, params: list[dict[str, Any]], *, masked: bool = False, first: int = 0
) -> tuple[list[list[int]], list[int], list[list[float]]]:
    """Accepted nodes, bonus tokens and log probabilities of a pass over the trees.

    `first` is the number of the first request, which is its seed.
    """
    batch: Any = Batch([Request(one, number) for number, one in enumerate(params, first)])
    verify_input = verify_input_of(trees, batch.seq_lens, "cpu", full_mask=False)
    # A captured graph has more rows than the pass.
    rows = torch.cat((verify_input.input_ids, torch.zeros(3, dtype=torch.int64)))
    depth = torch.cat((verify_input.positions, torch.zeros(3, dtype=torch.int64)))
    logits: Any = SimpleNamespace(next_token_logits=toy.LOGITS[rows] + 0.1 * depth.unsqueeze(1))
    logits.next_token_logits[:, ::2] -= 0.03 * depth.unsqueeze(1) ** 2
    mask = None
    if masked:
        forbidden = verify_input.input_ids.unsqueeze(1) == torch.arange(VOCAB)
        grammar: Any = SimpleNamespace(
            apply_vocab_mask=lambda logits, vocab_mask: logits.masked_fill_(vocab_mask, -1e9)
        )
        mask = GrammarMask(grammar, forbidden)
    with batch.forward(), sampling_seeds.seeded_draws(batch):
        predict, lens, index = sample_and_accept(verify_input, batch, logits, mask)
        batch.top_logprobs_nums = batch.token_ids_logprobs = None
        compute_spec_logprobs(batch, logits, predict, accept_index=index)
    outcome = ComingOutcome(predict, lens, index, trees.starts).read()
    found = logits.next_token_logprobs.tolist()
    kept = [row[:length] for row, length in zip(found, lens.tolist(), strict=True)]
    return outcome.accepted_nodes, outcome.bonus_ids, kept


def _proposals(trees: DraftTrees, batch: Any) -> Any:
    """Each request's first draft token with a candidate that has all probability."""
    drawn = StepProposals()
    for row, req in enumerate(batch.reqs):
        text = [int(trees.token_ids[row, min(1, trees.sizes[row] - 1)])]
        candidates = [Candidates(text, [1.0])]
        drawn.take(req.rid, Drafted(1, 64, len(req.output_ids), 0, text, candidates=candidates))
    reqs = batch.reqs
    return drawn.proposals([r.rid for r in reqs], [r.output_ids for r in reqs], trees)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_ragged_pass_accepts_what_a_pass_of_one_width_accepts(greedy: bool, masked: bool) -> None:
    count = 120
    params = [
        {**one, "temperature": 0.0} if greedy else one
        for one in itertools.islice(itertools.cycle(MIXED), count)
    ]
    trees = trees_of(count)
    assert len(set(trees.sizes.tolist())) > 3
    nodes, bonus, logprobs = accept(trees, params, masked=masked)
    expected = accept(replace(trees, ragged=False), params, masked=masked)
    assert (nodes, bonus) == expected[:2]
    for found, own in zip(logprobs, expected[2], strict=True):
        assert found == pytest.approx(own, rel=1e-5)
    assert sum(map(len, nodes)) > count / 8


def test_a_request_gets_the_same_tokens_as_alone() -> None:
    """The other requests of the pass have other parameters and other numbers of rows."""
    params = [dict(one) for one in MIXED * 12]
    trees = trees_of(len(params))
    nodes, bonus, logprobs = accept(trees, params)
    for row, one in enumerate(params):
        alone = DraftTrees.of([trees[row]], int(trees.sizes[row]))
        own_nodes, own_bonus, own_logprobs = accept(alone, [one], first=row)
        assert (nodes[row], bonus[row]) == (own_nodes[0], own_bonus[0])
        assert logprobs[row] == pytest.approx(own_logprobs[0], rel=1e-5)


def test_proposals_are_those_of_the_rows_of_a_ragged_pass() -> None:
    count = 40
    trees = trees_of(count)
    batch: Any = Batch([Request(MIXED[0], number) for number in range(count)])
    ragged = _proposals(trees, batch)
    uniform = _proposals(replace(trees, ragged=False), batch)
    dense = verify_input_of(trees, batch.seq_lens, "cpu", full_mask=False)
    places = dense.owners * trees.width + dense.offsets
    assert len(ragged.known) == trees.rows
    for own, other in zip(ragged, uniform, strict=True):
        assert torch.equal(own, other[places])


def test_a_custom_processor_changes_the_root_of_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request with a processor has no drafts, so its root is its only row."""
    trees = trees_of(6).cut(np.array([3, 1, 7, 2, 1, 4]))
    batch: Any = Batch([Request({"temperature": 0.0}, number) for number in range(6)])
    verify_input = verify_input_of(trees, batch.seq_lens, "cpu", full_mask=False)
    logits: Any = SimpleNamespace(next_token_logits=torch.zeros(trees.rows, VOCAB))

    def process(roots: torch.Tensor, info: object) -> None:
        roots[1] = torch.eye(VOCAB)[3]

    monkeypatch.setattr(
        "sglang_qspec.engine.passes.sample.sample.apply_custom_logit_processor", process
    )
    batch.sampling_info.has_custom_logit_processor = True
    sample_and_accept(verify_input, batch, logits)
    row = int(trees.starts[1])
    assert logits.next_token_logits[row].argmax() == 3
    assert logits.next_token_logits.sum() == 1
