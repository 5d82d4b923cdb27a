"""Penalties at a tree node equal those of plain decoding after the same tokens."""

import pytest
import torch

from sglang_qspec.trie import DraftTree, DraftTrees, Source
from sglang_qspec.verify.penalties import Penalty, penalize

VOCAB = 9
PENALTIES = [
    Penalty(frequency=0.4),
    Penalty(presence=-0.7),
    Penalty(repetition=1.3),
    Penalty(0.3, 0.2, 0.8),
    Penalty(min_new_tokens=5, stop_ids=(2, 6)),
    Penalty(0.3, 0.2, 1.4, min_new_tokens=4, stop_ids=(2,)),
]
TOKENS = (4, 2, 7, 2, 5, 2, 4)
PARENTS = (0, 0, 0, 1, 1, 3, 5)


def plainly(logits: list[float], penalty: Penalty, output: list[int]) -> list[float]:
    """The penalties token by token, as SGLang's parameters define them."""
    after = []
    for token, logit in enumerate(logits):
        times = output.count(token)
        logit -= penalty.frequency * times
        if times:
            logit -= penalty.presence
            logit = logit * penalty.repetition if logit < 0 else logit / penalty.repetition
        if token in penalty.stop_ids and len(output) < penalty.min_new_tokens:
            logit = float("-inf")
        after.append(logit)
    return after


def path(node: int) -> list[int]:
    """The tokens on the path to a node, without the root."""
    return [] if node == 0 else [*path(PARENTS[node]), TOKENS[node]]


def tree_mask(width: int) -> torch.Tensor:
    size = len(TOKENS)
    tree = DraftTree(
        TOKENS, PARENTS, (Source.STEP,) * size, tuple(1 / (1 + i) for i in range(size))
    )
    return torch.from_numpy(DraftTrees.of([tree], width).lay_out().mask[0])


@pytest.mark.parametrize("output", [[4], [4, 4, 1, 2, 4]])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_every_node_is_penalized_like_plain_decoding_after_its_path(
    penalty: Penalty, output: list[int]
) -> None:
    logits = torch.randn(len(TOKENS), VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    expected = [
        plainly(row, penalty, output + path(node)) for node, row in enumerate(logits.tolist())
    ]
    draft_ids = torch.tensor(TOKENS[1:])
    penalize(logits, penalty, torch.tensor(output), draft_ids, tree_mask(len(TOKENS)))
    assert torch.allclose(logits, torch.tensor(expected), atol=1e-5)


def test_an_empty_output_is_penalized_by_its_length_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    nothing = torch.empty(0, dtype=torch.int64)
    penalty = Penalty(1.0, 1.0, 2.0, min_new_tokens=1, stop_ids=(3,))
    penalize(logits, penalty, nothing, nothing, torch.ones(1, 1, dtype=torch.bool))
    assert logits[0].tolist() == [0.0, 0.0, 0.0, float("-inf"), *[0.0] * 5]


def test_padding_does_not_change_the_penalties_of_a_tree() -> None:
    width, size = len(TOKENS) + 3, len(TOKENS)
    logits = torch.randn(width, VOCAB, generator=torch.Generator().manual_seed(4))
    alone = logits[:size].clone()
    output, penalty = torch.tensor([4]), Penalty(0.3, 0.2, 1.4)
    padded = torch.tensor(TOKENS[1:] + TOKENS[-1:] * 3)
    penalize(logits, penalty, output, padded, tree_mask(width))
    penalize(alone, penalty, output, padded[: size - 1], tree_mask(size))
    assert torch.equal(logits[:size], alone)
