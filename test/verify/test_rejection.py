"""Rejection sampling keeps the target's distribution and has the highest possible acceptance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglang_qspec.cpu.tree_links import links_from_parents
from sglang_qspec.verify.accept import accept
from sglang_qspec.verify.rejection import Proposals, sample_near
from test.verify.chi_square import chi_square

_DRAWS = 100_000
_VOCAB = 5
_TARGET = torch.randn(_VOCAB, _VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
"""Logits of a toy target, by the preceding token."""
_NOISE = torch.randn(_VOCAB, _VOCAB, generator=torch.Generator().manual_seed(3))
_DRAFTERS = {
    "good": torch.softmax(_TARGET + 0.3 * _NOISE, -1),
    "bad": torch.softmax(3 * _NOISE, -1),
    "adversarial": torch.nn.functional.one_hot(_TARGET.argmin(-1), _VOCAB).float(),
    "equal": torch.softmax(_TARGET, -1),
}
Rule = Callable[[Tensor, Proposals], Tensor]


def _propose(probs: Tensor, size: int) -> Proposals:
    """Draw from the `size` likeliest tokens of each row, like a drafter with `size` candidates."""
    candidates, ids = probs.topk(size)
    candidates = candidates / candidates.sum(1, keepdim=True)
    token_ids = ids.gather(1, torch.multinomial(candidates, 1)).squeeze(1)
    return Proposals(torch.ones(len(probs), dtype=torch.bool), token_ids, ids, candidates)


def _careless(probs: Tensor, proposals: Proposals) -> Tensor:
    """A broken rule: after a rejection it draws from the target's whole distribution."""
    wanted = probs.gather(1, proposals.token_ids.unsqueeze(1)).squeeze(1)
    matches = proposals.candidate_ids == proposals.token_ids.unsqueeze(1)
    offered = (proposals.candidate_probs * matches).sum(1)
    kept = proposals.known & (torch.rand(len(probs)) * offered < wanted)
    return torch.where(kept, proposals.token_ids, torch.multinomial(probs, 1).squeeze(1))


def _speculate(
    drafter: Tensor, *, size: int = _VOCAB, choosy: bool = False, rule: Rule = sample_near
) -> Tensor:
    """Counts of the first two tokens after token 0.

    Each row's tree has a chain of two drawn tokens, and a fixed guess of two tokens beside it. With
    `choosy` the tree keeps the chain only if its first token is token 1.
    """
    target = torch.softmax(_TARGET, -1)
    first = _propose(drafter[0].expand(_DRAWS, -1), size)
    second = _propose(drafter[first.token_ids], size)
    tree = torch.tensor([[0, 0, 0, 3, 1]]).repeat(_DRAWS, 1)
    tree[:, 1], tree[:, 2] = first.token_ids, second.token_ids
    parents = torch.tensor([[0, 0, 1, 0, 3]]).repeat(_DRAWS, 1)
    if choosy:
        left_out = first.token_ids != 1
        parents[left_out, 1] = 1  # its own parent: not part of the tree
        parents[left_out, 2] = 2
    nothing = Proposals(
        torch.zeros(_DRAWS, dtype=torch.bool),
        torch.zeros(_DRAWS, dtype=torch.int64),
        first.candidate_ids,
        first.candidate_probs,
    )
    nodes = (first, second, nothing, nothing, nothing)
    draws = [rule(target[tree[:, i]], offer) for i, offer in enumerate(nodes)]
    targets = torch.stack(draws, 1)
    children, siblings = links_from_parents(parents)
    paths = accept(tree.tolist(), children.tolist(), siblings.tolist(), targets.tolist(), 5)
    one = targets[:, 0]
    second_node = torch.tensor([path[1] if len(path) > 1 else 3 for path in paths]).unsqueeze(1)
    two = targets.gather(1, second_node).squeeze(1)
    # If a pass yields one token, the next pass begins after it; a draft that continues from this
    # token still counts.
    short = torch.tensor([len(path) == 1 for path in paths])
    led = short & (one == first.token_ids)
    again = rule(target[one], second._replace(known=led))
    two = torch.where(short, again, two)
    return torch.bincount(one * _VOCAB + two, minlength=_VOCAB**2)


def _expected() -> Tensor:
    probs = torch.softmax(_TARGET.double(), -1)
    return (probs[0].unsqueeze(1) * probs).flatten()


@pytest.mark.parametrize("choosy", [False, True])
@pytest.mark.parametrize("size", [_VOCAB, 2])
@pytest.mark.parametrize("name", _DRAFTERS)
def test_text_follows_the_targets_distribution_whatever_was_drafted(
    name: str, size: int, choosy: bool
) -> None:
    torch.manual_seed(12)
    counts = _speculate(_DRAFTERS[name], size=size, choosy=choosy)
    assert chi_square(counts, _expected()) < 3.0


def test_the_statistic_catches_a_broken_rule() -> None:
    torch.manual_seed(12)
    counts = _speculate(_DRAFTERS["bad"], rule=_careless)
    assert chi_square(counts, _expected()) > 20.0


def test_the_statistic_catches_a_drafter_that_lies_about_its_distribution() -> None:
    def flattered(probs: Tensor, proposals: Proposals) -> Tensor:
        flat = torch.full_like(proposals.candidate_probs, 1 / _VOCAB)
        return sample_near(probs, proposals._replace(candidate_probs=flat))

    torch.manual_seed(12)
    counts = _speculate(_DRAFTERS["bad"], rule=flattered)
    assert chi_square(counts, _expected()) > 20.0


def test_the_statistic_catches_drafts_that_are_tested_only_where_the_tree_has_them() -> None:
    def only_likely_ones(probs: Tensor, proposals: Proposals) -> Tensor:
        tested = proposals.known & (proposals.token_ids == 1)
        return sample_near(probs, proposals._replace(known=tested))

    torch.manual_seed(12)
    counts = _speculate(_DRAFTERS["good"], choosy=True, rule=only_likely_ones)
    assert chi_square(counts, _expected()) > 20.0


@pytest.mark.parametrize("name", _DRAFTERS)
def test_the_acceptance_rate_equals_the_overlap_of_the_distributions(name: str) -> None:
    torch.manual_seed(3)
    target, drafter = torch.softmax(_TARGET, -1)[0], _DRAFTERS[name][0]
    offers = _propose(drafter.expand(_DRAWS, -1), _VOCAB)
    drawn = sample_near(target.expand(_DRAWS, -1), offers)
    kept = (drawn == offers.token_ids).float().mean()
    assert kept == pytest.approx(float(torch.minimum(target, drafter).sum()), abs=0.01)


def test_a_filtered_target_never_draws_a_filtered_token() -> None:
    target = torch.tensor([[0.0, 0.7, 0.0, 0.3, 0.0]]).expand(2000, -1)
    drawn = sample_near(target, _propose(_DRAFTERS["bad"][1].expand(2000, -1), _VOCAB))
    assert set(drawn.tolist()) == {1, 3}
