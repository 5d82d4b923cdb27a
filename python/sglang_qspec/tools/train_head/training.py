"""The training of a head: its loss along texts of the target, and how often it drafts right.

A head drafts several tokens one after another, and reads its own output for all but the first. So
it is trained as it drafts (training-time test, Li et al. 2025, arXiv 2503.01840): at depth d row i
reads its output at depth d - 1 and token i + 1 + d of the text, and its attention sees the rows up
to i at depth 0 and its own at the depths up to d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sglang_qspec.heads.checkpoint import AnyHead
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.tools.train_head.target import PAD, TargetModel, WrittenText

DECAY = 0.8
"""Weight of the loss at a depth over that at the depth before."""
STATE_WEIGHT = 10.0
"""Weight of an EAGLE-2 head's distance from the target's states over its cross entropy, as in the
authors' training (Li et al. 2024, arXiv 2401.15077)."""


class PaddedTexts(NamedTuple):
    """Texts of one step, padded to the longest."""

    token_ids: Tensor
    """Int64 [texts, tokens]."""
    begins: Tensor
    """Length of each text's prompt, int64 [texts]."""
    ends: Tensor
    """Length of each text, int64 [texts]."""
    greedy: Tensor
    """Whether the answers are greedy, bool [texts]."""

    @classmethod
    def of(cls, texts: Sequence[WrittenText], device: torch.device) -> PaddedTexts:
        """The batch of some texts."""
        ids = torch.full((len(texts), max(len(each.token_ids) for each in texts)), PAD)
        for row, text in enumerate(texts):
            ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        begins = torch.tensor([len(each.prompt) for each in texts])
        ends = torch.tensor([len(each.token_ids) for each in texts])
        greedy = torch.tensor([each.greedy for each in texts])
        return cls(ids.to(device), begins.to(device), ends.to(device), greedy.to(device))

    def answers(self, depth: int) -> Tensor:
        """Whether row i drafts a token of the answer at this depth, bool [texts, tokens]."""
        drafted = torch.arange(self.token_ids.shape[1], device=self.ends.device) + 2 + depth
        return (drafted >= self.begins[:, None]) & (drafted < self.ends[:, None])

    @property
    def taught(self) -> Tensor:
        """Whether the token after place i is one of the answer, bool [texts, tokens]."""
        after = torch.arange(self.token_ids.shape[1], device=self.ends.device) + 1
        return (after >= self.begins[:, None]) & (after < self.ends[:, None])

    def tokens(self, ahead: int) -> Tensor:
        """Token i + `ahead` at place i, padded at the end, int64 [texts, tokens]."""
        return functional.pad(
            self.token_ids[:, ahead:], (0, min(ahead, self.token_ids.shape[1])), value=PAD
        )


def depths(
    head: AnyHead, states: Tensor, batch: PaddedTexts, embedding: Tensor, most: int
) -> Iterator[Tensor]:
    """The head's outputs at each depth below `most`, [texts, tokens, width].

    `states` are those that the head reads (`target.TargetStates`), and `embedding` is the target's.
    """
    if isinstance(head, MedusaHeads):
        yield from (head.output(states, number) for number in range(most))
        return
    if isinstance(head, HydraHead):
        for depth in range(most):
            embeds = functional.embedding(batch.tokens(1 + depth), embedding)
            states = head.output(embeds.to(states.dtype), states)
            yield states
        return
    hidden = head.project(states)
    size = batch.token_ids.shape[1]
    positions = torch.arange(size, device=hidden.device).expand(len(batch.token_ids), -1)
    hides = torch.ones(size, size, dtype=torch.bool, device=hidden.device).triu(1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for depth in range(most):
        embeds = functional.embedding(batch.tokens(1 + depth), embedding).to(hidden.dtype)
        query, key, value, residual = head.inputs(embeds, hidden, positions + depth)
        shared = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(shared, 1))
        values.append(value.repeat_interleave(shared, 1))
        scale = query.shape[-1] ** -0.5
        scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(hides, float("-inf"))]
        scores += [(query * own).sum(-1, keepdim=True) for own in keys[1:]]
        weights = (torch.cat(scores, -1).float() * scale).softmax(-1).to(hidden.dtype)
        mixed = weights[..., :size] @ values[0]
        for place, own in enumerate(values[1:]):
            mixed = mixed + weights[..., size + place, None] * own
        hidden = head.output(mixed, residual)
        yield hidden


def _logits(head: AnyHead, output: Tensor, depth: int) -> Tensor:
    """Logits of the head's own ids for outputs of `depths`, [..., draft ids]."""
    return head.logits(output, depth) if isinstance(head, MedusaHeads) else head.logits(output)


class Teacher:
    """The distributions of the target that a head learns, over the ids that it drafts."""

    def __init__(self, target: TargetModel, head: AnyHead) -> None:
        self._lm_head = target.lm_head[head.target_ids].clone()
        self._knows = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=target.device)
        self._knows[head.target_ids] = True

    def logits(self, last: Tensor) -> Tensor:
        """The target's logits of the ids after each state, [..., draft ids]."""
        return last @ self._lm_head.T

    def knows(self, token_ids: Tensor) -> Tensor:
        """Whether the head has these ids of the target."""
        return self._knows[token_ids]


def loss(
    head: AnyHead,
    teacher: Teacher,
    target: TargetModel,
    batch: PaddedTexts,
    layers: Sequence[int],
    most: int,
) -> Tensor:
    """The loss over all depths below `most`: how far the head's distributions are off.

    An EAGLE-2 head also learns to give the states that the target's LM head will read. Logits are
    computed for tokens of answers alone, because they take most of the time.
    """
    states = target.states(batch.token_ids, layers)
    taught = batch.taught
    wanted = teacher.logits(states.last[taught].clone()).float().softmax(-1)
    place = taught.flatten().cumsum(0).view_as(taught) - 1
    total = torch.zeros((), device=wanted.device)
    weight = 1.0
    found = depths(head, states.read.clone(), batch, target.embedding, most)
    for depth, hidden in enumerate(found):
        counts = batch.answers(depth) & teacher.knows(batch.tokens(2 + depth))
        rows = counts[:, : taught.shape[1] - 1 - depth].nonzero(as_tuple=True)
        own = _logits(head, hidden[rows], depth).float().log_softmax(-1)
        probs = wanted[place[rows[0], rows[1] + 1 + depth]]
        total = total - weight * (probs * own).sum(-1).sum() / max(1, len(rows[0]))
        if isinstance(head, Eagle2Head) and len(rows[0]):
            coming = states.last[rows[0], rows[1] + 1 + depth].clone()
            distance = functional.smooth_l1_loss(hidden[rows].float(), coming.float())
            total = total + weight * STATE_WEIGHT * distance
        weight *= DECAY
    return total


class HeadFit(NamedTuple):
    """How well a head drafts along greedy answers of its target."""

    right: list[float]
    """By depth, share of tokens that are the target's, given the target's tokens before them."""
    accepted: list[float]
    """By depth, share of the drafts of which all tokens up to this depth are the target's."""

    @property
    def accept_length(self) -> float:
        """Tokens of a pass over a greedy draft as long as there are depths."""
        return 1.0 + sum(self.accepted)


@torch.inference_mode()
def fit(
    head: AnyHead,
    target: TargetModel,
    texts: Sequence[WrittenText],
    layers: Sequence[int],
    most: int,
) -> HeadFit:
    """Judge a head by greedy answers that it was not trained with."""
    ids = head.target_ids
    right, accepted, rows = [0] * most, [0] * most, [0] * most
    for text in texts:
        batch = PaddedTexts.of([text], target.device)
        states = target.states(batch.token_ids, layers)
        begin = batch.answers(0) & batch.answers(most - 1)  # a token of the answer at each depth
        chain = begin
        for depth, hidden in enumerate(depths(head, states.read, batch, target.embedding, most)):
            is_right = torch.zeros_like(begin)
            drafted = ids[_logits(head, hidden[begin], depth).argmax(-1)]
            is_right[begin] = drafted == batch.tokens(2 + depth)[begin]
            chain = chain & is_right
            right[depth] += int(is_right.sum())
            accepted[depth] += int(chain.sum())
            rows[depth] += int(begin.sum())
    return HeadFit(_shares(right, rows), _shares(accepted, rows))


def _shares(counts: Sequence[int], rows: Sequence[int]) -> list[float]:
    return [count / max(1, most) for count, most in zip(counts, rows, strict=True)]
