"""The target's passes draw tokens with the sampling seeds of the requests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.messages import SeededSampling
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, sample_probs
from test.verify.chi_square import chi_square

VOCAB = 4
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
"""Logits of a toy target, by the token before."""


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seeded draws are installed during a test."""
    sample_from_probs = Sampler._sample_from_probs
    sampling_seeds.install()
    yield
    Sampler._sample_from_probs = sample_from_probs


class Req:
    """The part of SGLang's request that the code reads."""

    rid = "a"
    output_ids = (0,)

    def __init__(self, **params: Any) -> None:
        self.sampling_params = SamplingParams(**params)
        self.sampling_params.normalize(None)


def info_of(reqs: list[Req]) -> SamplingBatchInfo:
    params = [req.sampling_params for req in reqs]
    return SamplingBatchInfo(
        temperatures=torch.tensor([[p.temperature] for p in params]),
        top_ps=torch.tensor([p.top_p for p in params]),
        top_ks=torch.tensor([p.top_k for p in params]),
        min_ps=torch.tensor([p.min_p for p in params]),
        is_all_greedy=all(p.top_k == 1 for p in params),
        is_any_greedy=any(p.top_k == 1 for p in params),
        need_top_p_sampling=any(p.top_p < 1 for p in params),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        vocab_size=VOCAB,
        return_sampling_masks=[False] * len(reqs),
    )


def batch_of(reqs: list[Req], **fields: Any) -> Any:
    return SimpleNamespace(reqs=reqs, sampling_info=info_of(reqs), **fields)


def test_a_greedy_request_has_no_seed_and_another_the_one_of_its_parameters() -> None:
    assert sampling_seeds.seeded_of(Req(temperature=0)) is None
    asked = Req(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, sampling_seed=-3)
    assert sampling_seeds.seeded_of(asked) == SeededSampling(-3, 0.7, 20, 0.9, 0.05)
    plain = sampling_seeds.seeded_of(Req(temperature=1.5))
    assert plain is not None
    assert plain == SeededSampling(plain.seed, 1.5)


def test_each_request_has_its_own_secret_seed_and_keeps_it() -> None:
    one, other = Req(temperature=1), Req(temperature=1)
    first, second = sampling_seeds.seeded_of(one), sampling_seeds.seeded_of(other)
    assert first is not None
    assert second is not None
    assert first.seed != second.seed
    assert sampling_seeds.seeded_of(one) == first


def test_under_rejection_sampling_the_sidecar_does_not_learn_a_secret_seed() -> None:
    secret = Req(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    assert sampling_seeds.seeded_of(secret, reject=True) == SeededSampling(
        0, 0.7, 20, 0.9, 0.05, probabilities=True
    )
    asked, greedy = Req(temperature=0.7, sampling_seed=3), Req(temperature=0)
    assert sampling_seeds.seeded_of(asked, reject=True) == SeededSampling(3, 0.7)
    assert sampling_seeds.seeded_of(greedy, reject=True) is None


def test_a_batch_has_seeds_only_during_a_pass_even_one_that_fails() -> None:
    batch = batch_of([Req(temperature=1, sampling_seed=7), Req(temperature=0)])

    def fail() -> None:
        with sampling_seeds.seeded_draws(batch):
            assert batch.sampling_info.sampling_seed[0] == 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert batch.sampling_info.sampling_seed is None


def test_only_the_pass_that_is_given_proposals_uses_them() -> None:
    certain = Proposals(
        torch.tensor([True, False]),
        torch.tensor([2, 0]),
        torch.tensor([[2], [0]]),
        torch.ones(2, 1),
    )
    batch = batch_of([Req(temperature=1, sampling_seed=7), Req(temperature=1, sampling_seed=8)])
    probs = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    with sampling_seeds.seeded_draws(batch, certain):
        draws = sampling_seeds.draws_of(batch.sampling_info, torch.zeros(2))
        assert draws.proposals is not None
        assert all(map(torch.equal, draws.proposals, certain))
        tokens, _ = Sampler._sample_from_probs(
            None, probs, batch.sampling_info, torch.tensor([4, 4]), True
        )
    assert tokens.tolist() == [2, 1]
    with sampling_seeds.seeded_draws(batch):
        assert sampling_seeds.draws_of(batch.sampling_info, torch.zeros(2)).proposals is None


def test_passes_over_one_lineup_share_the_seeds_but_not_the_proposals() -> None:
    batch = batch_of([Req(temperature=1, sampling_seed=7, top_k=3), Req(temperature=1)])
    lineup, info = Lineup(batch.reqs), batch.sampling_info

    def draws(proposals: Proposals | None = None) -> Draws:
        with sampling_seeds.seeded_draws(batch, proposals, lineup):
            return sampling_seeds.draws_of(info, torch.zeros(2))

    first, again = draws(), draws()
    assert first.seeds is not None
    assert again.seeds is not None
    assert first.seeds[0] == 7
    assert again.seeds.data_ptr() == first.seeds.data_ptr()
    assert again.rank_limit == first.rank_limit == 3
    own = draws(Proposals(torch.tensor([True, True]), *[torch.zeros(2, 1)] * 3))
    assert own.proposals is not None
    assert draws().proposals is None
    assert info.sampling_seed is None


def test_greedy_batches_and_batches_with_sampling_masks_get_no_seeds() -> None:
    greedy, masked = batch_of([Req(temperature=0)]), batch_of([Req(temperature=1)])
    masked.sampling_info.sampling_mask_batch_indices = torch.tensor([0])
    for batch in (greedy, masked):
        with sampling_seeds.seeded_draws(batch):
            assert batch.sampling_info.sampling_seed is None


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 3}])
def test_sglangs_own_sampler_uses_the_seeds_in_passes_without_drafts(params: Any) -> None:
    reqs = [Req(temperature=1.0, sampling_seed=seed, **params) for seed in range(50)]
    batch = batch_of(reqs)
    probs = torch.softmax(0.3 * TABLE[0].expand(50, -1), -1)
    positions = torch.arange(50) + 100
    with sampling_seeds.seeded_draws(batch):
        info = batch.sampling_info
        simple = not params
        tokens, _ = Sampler._sample_from_probs(None, probs, info, positions, simple)
    draws = Draws(info.top_ks, info.top_ps, info.min_ps, torch.arange(50), positions)
    assert tokens.tolist() == sample_probs(probs, draws).tolist()
    assert len(set(tokens.tolist())) > 1


def test_without_seeds_sglangs_own_sampler_draws_as_before() -> None:
    torch.manual_seed(1)
    probs = torch.softmax(TABLE[0].expand(500, -1), -1)
    info = info_of([Req(temperature=1)] * 500)
    tokens, _ = Sampler._sample_from_probs(None, probs, info, torch.zeros(500), True)
    torch.manual_seed(1)
    assert torch.equal(tokens, torch.multinomial(probs, 1)[:, 0].int())


def verify(reqs: list[Req], tree: DraftTree, committed: int) -> list[list[int]]:
    """The tokens that `sample_and_accept` accepts for each request, with the bonus token."""
    trees = DraftTrees.of([tree] * len(reqs), len(tree))
    seq_lens = torch.full((len(reqs),), committed - 1)
    verify_input = verify_input_of(trees, seq_lens, "cpu", full_mask=False)
    batch = batch_of(reqs, forward_mode=ForwardMode.TARGET_VERIFY, seq_lens=seq_lens)
    logits = SimpleNamespace(next_token_logits=TABLE[verify_input.draft_token])
    with sampling_seeds.seeded_draws(batch), get_parallel_of_one():
        predict, accept_lens, accept_index = sample_and_accept(verify_input, batch, logits)
    return [
        predict[indices[:length].long()].tolist()
        for indices, length in zip(accept_index, accept_lens.tolist(), strict=True)
    ]


def get_parallel_of_one() -> Any:
    return get_parallel().override(tp_group=SimpleNamespace(world_size=1))


TREE = DraftTree((0, 3, 1, 2, 0), (0, 0, 0, 2, 1), (Source.STEP,) * 5, (1.0, 0.9, 0.8, 0.7, 0.6))


@pytest.mark.parametrize("secret", [True, False])
def test_text_from_verified_trees_has_the_targets_distribution(secret: bool) -> None:
    """Compares the first two tokens after token 0, which may take two passes."""
    count = 15_000
    reqs = [
        Req(temperature=1.0, **({} if secret else {"sampling_seed": seed})) for seed in range(count)
    ]
    texts = verify(reqs, TREE, committed=9)
    assert sum(len(text) > 1 for text in texts) > count / 4
    for last in range(VOCAB):
        # If the first pass gave one token only, a plain pass gives the next.
        short = [row for row, text in enumerate(texts) if text == [last]]
        root = DraftTree((last,), (0,), (Source.STEP,), (1.0,))
        for row, text in zip(short, verify([reqs[row] for row in short], root, 10), strict=True):
            texts[row] += text
    counts = torch.zeros(VOCAB, VOCAB)
    for text in texts:
        counts[text[0], text[1]] += 1
    probs = torch.softmax(TABLE.double(), -1)
    expected = probs[0].unsqueeze(1) * probs
    assert chi_square(counts.flatten(), expected.flatten()) < 3.0


def test_the_same_seed_gives_the_same_text_whatever_was_drafted() -> None:
    reqs = [Req(temperature=1.0, sampling_seed=seed) for seed in range(500)]
    texts = verify(reqs, TREE, committed=9)
    other = DraftTree((0, 1, 2, 3), (0, 0, 0, 0), (Source.STEP,) * 4, (1.0, 0.9, 0.8, 0.7))
    for mine, theirs in zip(texts, verify(reqs, other, committed=9), strict=True):
        assert mine[: len(theirs)] == theirs[: len(mine)]
    assert len({tuple(text) for text in texts}) > 5
