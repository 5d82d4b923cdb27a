"""Penalties at a tree node equal those of plain decoding after the same tokens."""

import pytest
import torch

from sglang_qspec.trie import DraftTree, DraftTrees, Source
from sglang_qspec.verify.penalties import BatchPenalties, Penalty, penalize

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


def of_batch(penalties: list[Penalty], outputs: list[list[int]], rows: list[int]) -> BatchPenalties:
    """The penalties of the requests at `rows`, with padding as the engine makes it."""
    most = max(1, *(len(set(output)) for output in outputs))
    stops = max(len(penalty.stop_ids) for penalty in penalties)
    ids, counts, stop_ids = [], [], []
    for penalty, output in zip(penalties, outputs, strict=True):
        own = sorted(set(output)) or [0]
        own += own[:1] * (most - len(own))
        ids.append(own)
        counts.append([float(output.count(token)) for token in own])
        stop_ids.append((list(penalty.stop_ids) or [0]) * stops)
    return BatchPenalties(
        torch.tensor(rows),
        torch.tensor([penalty.frequency for penalty in penalties]),
        torch.tensor([penalty.presence for penalty in penalties]),
        torch.tensor([penalty.repetition for penalty in penalties]),
        torch.tensor([penalty.min_new_tokens for penalty in penalties]),
        torch.tensor([each[:stops] for each in stop_ids], dtype=torch.int64).view(len(rows), stops),
        torch.tensor([len(output) for output in outputs]),
        torch.tensor(ids),
        torch.tensor(counts),
    )


def penalize_one(
    logits: torch.Tensor, penalty: Penalty, output: list[int], tokens: list[int], mask: torch.Tensor
) -> None:
    batch = of_batch([penalty], [output], [0])
    rows = torch.arange(len(tokens)).unsqueeze(0)
    penalize(logits, batch, torch.tensor([tokens]), mask.unsqueeze(0), rows)


@pytest.mark.parametrize("output", [[4], [4, 4, 1, 2, 4]])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_every_node_is_penalized_like_plain_decoding_after_its_path(
    penalty: Penalty, output: list[int]
) -> None:
    logits = torch.randn(len(TOKENS), VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    expected = [
        plainly(row, penalty, output + path(node)) for node, row in enumerate(logits.tolist())
    ]
    penalize_one(logits, penalty, output, list(TOKENS), tree_mask(len(TOKENS)))
    assert torch.allclose(logits, torch.tensor(expected), atol=1e-5)


def test_an_empty_output_is_penalized_by_its_length_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    penalty = Penalty(1.0, 1.0, 2.0, min_new_tokens=1, stop_ids=(3,))
    penalize_one(logits, penalty, [], [0], torch.ones(1, 1, dtype=torch.bool))
    assert logits[0].tolist() == [0.0, 0.0, 0.0, float("-inf"), *[0.0] * 5]


def test_padding_does_not_change_the_penalties_of_a_tree() -> None:
    width, size = len(TOKENS) + 3, len(TOKENS)
    logits = torch.randn(width, VOCAB, generator=torch.Generator().manual_seed(4))
    alone = logits[:size].clone()
    penalty, padded = Penalty(0.3, 0.2, 1.4), [*TOKENS, *TOKENS[-1:] * 3]
    penalize_one(logits, penalty, [4], padded, tree_mask(width))
    penalize_one(alone, penalty, [4], padded[:size], tree_mask(size))
    assert torch.equal(logits[:size], alone)


def test_the_penalties_of_a_batch_are_those_of_each_request_alone(device: torch.device) -> None:
    """The requests differ in the number of distinct tokens and of stop tokens."""
    size, outputs = len(TOKENS), [[4, 4, 1, 2, 4], [], [0, 4], [4], [7, 0, 0, 4], [2, 2, 2]]
    logits = torch.randn(8, size, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    expected, rows = logits.clone(), [6, 0, 3, 1, 7, 4]
    for row, penalty, output in zip(rows, PENALTIES, outputs, strict=True):
        penalize_one(expected[row], penalty, output, list(TOKENS), tree_mask(size))
    before = logits.clone()
    batch = BatchPenalties(*(each.to(device) for each in of_batch(PENALTIES, outputs, rows)))
    token_ids = torch.tensor(TOKENS, device=device).expand(8, -1)
    nodes = torch.arange(8 * size, device=device).view(8, size)
    mask = tree_mask(size).to(device).expand(8, -1, -1)
    logits = logits.to(device)
    penalize(logits.view(8 * size, VOCAB), batch, token_ids, mask, nodes)
    logits = logits.cpu()
    rounding = 0.0 if device.type == "cpu" else 1e-5
    torch.testing.assert_close(logits, expected, rtol=rounding, atol=rounding)
    assert torch.equal(logits[[2, 5]], before[[2, 5]])
    assert not torch.equal(logits[rows], before[rows])
