"""Under rejection sampling, text from tree and plain passes has the target's distribution.

The tests follow two tokens through whole passes: draft messages, trees that depend on the drafts,
`sample_and_accept` and SGLang's sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.requests.step_proposals import StepProposals
from sglang_qspec.messages import Candidates, Drafted
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, distributions
from test.verify.chi_square import chi_square

COUNT = 100_000
VOCAB = 4
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
"""Logits of a toy target, by the token before."""
NOISE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
DRAFTERS = {
    "good": torch.softmax(TABLE + 0.5 * NOISE, -1),
    "bad": torch.softmax(2 * NOISE, -1),
    "adversarial": torch.nn.functional.one_hot(TABLE.argmin(-1), VOCAB) * 0.9 + 0.025,
    "cut": torch.softmax(TABLE + 0.5 * NOISE, -1) * torch.tensor([1.0, 1.0, 1.0, 0.0]),
}
PAIRS = [(one, two) for one in range(VOCAB) for two in range(VOCAB)]
Rule = Callable[[Proposals, DraftTrees | None], Proposals | None]


@pytest.fixture(autouse=True)
def rejecting() -> Iterator[None]:
    """Seeded draws are installed during a test."""
    sample_from_probs = Sampler._sample_from_probs
    sampling_seeds.install()
    yield
    Sampler._sample_from_probs = sample_from_probs


class Req:
    """The part of SGLang's request that the code reads; all requests share their parameters."""

    sampling_params = SamplingParams(temperature=1.0)
    output_ids = (0,)


def normalised(drafter: Tensor) -> Tensor:
    drafter = drafter.double()
    return drafter / drafter.sum(-1, keepdim=True)


def candidates(drafter: Tensor) -> Candidates:
    token_ids = drafter.nonzero().flatten()
    return Candidates(token_ids.tolist(), drafter[token_ids].tolist())


def drafted(drafter: Tensor) -> StepProposals:
    """Proposals of one request for each pair of tokens that may be drafted after token 0."""
    drawn = StepProposals()
    for one, two in PAIRS:
        of_pair = [candidates(drafter[0]), candidates(drafter[one])]
        rid = str((one, two))
        drawn.take(rid, Drafted(1, 64, 1, 0, [one, two], candidates=of_pair))
    return drawn


def tree_of(one: int, two: int) -> DraftTree:
    """A tree that depends on the drafted pair, as trust and width choose: it has some pairs only.

    It also has a fixed guess with a continuation.
    """
    guess = 3 if one != 3 else 2
    token_ids, parents = [0, guess, 1], [0, 0, 1]
    if two != 0:  # the second token decides whether the first is in the tree
        token_ids, parents = [*token_ids, one], [*parents, 0]
        if two != 2:
            token_ids, parents = [*token_ids, two], [*parents, 3]
    scores = tuple(1 / (1 + node) for node in range(len(token_ids)))
    return DraftTree(tuple(token_ids), tuple(parents), (Source.STEP,) * len(parents), scores)


def spread(proposals: Proposals | None, rows: Tensor, width: int) -> Proposals | None:
    """Proposals of many requests, each a copy of the request that `rows` names."""
    if proposals is None:
        return None
    nodes = rows.unsqueeze(1) * width + torch.arange(width)
    return proposals.of(nodes.flatten())


def info_of(count: int, top_k: int) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        temperatures=torch.ones(count, 1),
        top_ps=torch.ones(count),
        top_ks=torch.full((count,), top_k),
        # Drops no token, but the sampler draws filtered rows all at once.
        min_ps=torch.full((count,), 1e-9),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=top_k < VOCAB,
        need_min_p_sampling=True,
        vocab_size=VOCAB,
        return_sampling_masks=[False] * count,
    )


def verified(
    reqs: list[Req], trees: DraftTrees, proposals: Proposals | None, top_k: int
) -> list[list[int]]:
    """The tokens that `sample_and_accept` accepts for each request, with the bonus token."""
    seq_lens = torch.full((len(trees),), 9)
    verify_input = verify_input_of(trees, seq_lens, "cpu", full_mask=False)
    batch: Any = SimpleNamespace(
        reqs=reqs,
        sampling_info=info_of(len(reqs), top_k),
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=seq_lens,
    )
    logits: Any = SimpleNamespace(next_token_logits=TABLE[verify_input.draft_token])
    group = SimpleNamespace(world_size=1)
    with sampling_seeds.seeded_draws(batch, proposals), get_parallel().override(tp_group=group):
        predict, accept_lens, accept_index = sample_and_accept(verify_input, batch, logits)
    tokens = predict[accept_index.clamp(min=0)].tolist()
    return [row[:length] for row, length in zip(tokens, accept_lens.tolist(), strict=True)]


def decoded(reqs: list[Req], last: Tensor, proposals: Proposals | None, top_k: int) -> Tensor:
    """The token that a plain pass gives after each token of `last`: int64 [bs]."""
    info = info_of(len(reqs), top_k)
    batch: Any = SimpleNamespace(reqs=reqs, sampling_info=info)
    with sampling_seeds.seeded_draws(batch, proposals):
        probs = torch.softmax(TABLE[last], -1)
        positions = torch.full((len(last),), 10)
        tokens, _ = Sampler._sample_from_probs(None, probs, info, positions, False)
    token_ids: Tensor = tokens.long()
    return token_ids


def as_it_is(proposals: Proposals, trees: DraftTrees | None) -> Proposals:
    return proposals


def speculate(name: str, rule: Rule = as_it_is, *, top_k: int = VOCAB) -> tuple[Tensor, float]:
    """Counts of the first two tokens after token 0, and how often the first was the drafted one.

    `rule` changes the proposals of a pass, given its trees, or None for a plain pass.
    """
    torch.manual_seed(12)
    drafter = normalised(DRAFTERS[name])
    chances = (drafter[0].unsqueeze(1) * drafter).flatten()
    kinds = torch.multinomial(chances, COUNT, replacement=True)

    drawn = drafted(drafter)
    rids, trees = list(map(str, PAIRS)), DraftTrees.of([tree_of(*pair) for pair in PAIRS], 5)
    proposals = drawn.proposals(rids, [[0]] * len(PAIRS), trees)
    assert proposals is not None
    near = spread(rule(proposals, trees), kinds, trees.width)
    reqs = [Req() for _ in range(COUNT)]
    texts = verified(reqs, _rows(trees, kinds), near, top_k)

    one = torch.tensor([text[0] for text in texts])
    two = torch.tensor([text[1] if len(text) > 1 else -1 for text in texts])
    for last in range(VOCAB):
        # If the first pass gave one token only, a plain pass follows.
        short = ((two < 0) & (one == last)).nonzero().flatten()
        drawn = drafted(drafter)
        following = drawn.proposals(rids, [[0, last]] * len(PAIRS))
        near = None if following is None else spread(rule(following, None), kinds[short], 1)
        two[short] = decoded([reqs[row] for row in short.tolist()], one[short], near, top_k)
    agreed = one == torch.tensor([pair[0] for pair in PAIRS])[kinds]
    return torch.bincount(one * VOCAB + two, minlength=VOCAB**2), float(agreed.float().mean())


def _rows(trees: DraftTrees, rows: Tensor) -> DraftTrees:
    index = rows.numpy()
    arrays = (trees.token_ids, trees.parents, trees.sources, trees.scores, trees.sizes)
    return DraftTrees(*(array[index] for array in arrays))


def target(top_k: int) -> Tensor:
    draws = Draws(top_ks=torch.full((VOCAB,), top_k))
    return distributions(torch.softmax(TABLE.double(), -1), draws)


@pytest.mark.parametrize(
    ("name", "top_k"), [("good", VOCAB), ("bad", 3), ("adversarial", VOCAB), ("cut", 3)]
)
def test_text_has_the_targets_distribution_and_equals_the_drafts_as_often_as_possible(
    name: str, top_k: int
) -> None:
    counts, agreed = speculate(name, top_k=top_k)
    probs = target(top_k)
    assert chi_square(counts, (probs[0].unsqueeze(1) * probs).flatten()) < 3.0
    overlap = float(torch.minimum(probs[0], normalised(DRAFTERS[name])[0]).sum())
    assert agreed == pytest.approx(overlap, abs=0.01)


def nowhere_without_drafts(proposals: Proposals, trees: DraftTrees | None) -> Proposals | None:
    """Broken rule: plain passes ignore the drafts."""
    return proposals if trees is not None else None


def only_in_the_tree(proposals: Proposals, trees: DraftTrees | None) -> Proposals:
    """Broken rule: a drafted token counts only if it is a node of the tree."""
    if trees is None:
        return proposals
    in_tree = [
        any(
            parent == node and token_id == int(proposals.token_ids[row * trees.width + node])
            for parent, token_id in zip(tree.parents[1:], tree.token_ids[1:], strict=True)
        )
        for row in range(len(trees))
        for tree in [trees[row]]
        for node in range(trees.width)
    ]
    return proposals._replace(known=proposals.known & torch.tensor(in_tree))


def misreported(proposals: Proposals, trees: DraftTrees | None) -> Proposals:
    """Broken rule: the sidecar sends wrong probabilities."""
    candidates = (proposals.candidate_probs > 0).double()
    return proposals._replace(candidate_probs=candidates / candidates.sum(1, keepdim=True))


@pytest.mark.parametrize("broken", [nowhere_without_drafts, only_in_the_tree, misreported])
def test_the_statistic_catches_a_broken_rule(broken: Rule) -> None:
    counts, _ = speculate("bad", broken)
    probs = target(VOCAB)
    assert chi_square(counts, (probs[0].unsqueeze(1) * probs).flatten()) > 20.0
