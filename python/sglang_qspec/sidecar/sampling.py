"""Choosing draft tokens from logits: a batch at once, cheap on a CPU, repeatable.

A draft only proposes, so its distribution may be cut where cutting saves time. The vocabulary is
looked at in blocks: the maxima of all blocks come from one fast pass over the logits, and only
the blocks with the largest maxima are sampled from. They hold the `BLOCKS` likeliest tokens and
many more. On one core, 64 rows of 49,152 logits take about 2 ms this way, where a softmax over
everything takes 7 and a top-k 14.

Step drafts of sampled requests are drawn just as the target draws (`verify.sample`), which takes
16 ms for as many rows: tokens that only noise makes the winner are won by both. Or, where the
target wants to know what they were drawn from, from the likeliest tokens alone, and with numbers
that nobody else has: those of torch begin with the same seed in server and sidecar.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.messages import MAX_CANDIDATES, Candidates, SeededSampling
from sglang_qspec.verify.sample import Draws, likeliest_left, sample_targets

BLOCK = 64
"""Tokens in a block."""
BLOCKS = 32
"""Blocks that are sampled from."""
MAX_TEMPERATURE = 1e6
"""Highest temperature that tokens are drawn with; a higher one draws from all tokens alike, too. In
float32 a temperature over 3e38 is infinite, and no block could be filled up with -inf."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one completion are chosen."""

    temperature: float
    """0 takes the likeliest."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this much of the probability together, and one at least
    (nucleus sampling, Holtzman et al., 2020). The probability is that of the blocks that are
    sampled from, of which the best tokens hold nearly all."""


GREEDY = Sampling(0.0)

_own_numbers = np.random.default_rng()
"""Seeded by the operating system."""


class Choices(NamedTuple):
    """Tokens for the rows of a pass."""

    token_ids: list[int]
    candidates: dict[int, Candidates]
    """What they were drawn from, by row, for those whose target wants to know."""


def seed_of(token_ids: Sequence[int], completion: int) -> int:
    """The seed of one completion of a prompt: the same in every run, different for each."""
    digest = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8)
    digest.update(completion.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) for each pair of seed and position: float64 [n].

    SplitMix64 (Steele, Lea and Flood, 2014) with the position as its counter, so that a token
    does not depend on which other rows were in the batch.
    """
    with np.errstate(over="ignore"):
        z = np.array(seeds, dtype=np.uint64)
        z += (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def choose(
    logits: torch.Tensor,
    samplings: Sequence[Sampling | SeededSampling],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> Choices:
    """A token for each row of `logits` (float [n, vocab]), chosen as `samplings[i]` says.

    A greedy row gives what `argmax` does, the lowest id among equals. A drawn row depends on its
    own logits, sampling, `seeds[i]` and `positions[i]`, and on no other row; with
    `SeededSampling.probabilities` also on chance.
    """
    greedy: list[int] = []
    drawn: dict[int, Sampling] = {}
    seeded: dict[int, SeededSampling] = {}
    rejection: dict[int, SeededSampling] = {}
    for i, sampling in enumerate(samplings):
        if isinstance(sampling, SeededSampling):
            (rejection if sampling.probabilities else seeded)[i] = sampling
        elif sampling.temperature > 0:
            drawn[i] = sampling
        else:
            greedy.append(i)
    tokens = [0] * len(samplings)
    if greedy or drawn:
        blocks = _blocks(logits)
        maxima = blocks.amax(-1)
    if greedy:
        for i, token in zip(greedy, _likeliest(blocks, maxima, greedy).tolist(), strict=True):
            tokens[i] = token
    if drawn:
        uniform = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        picked = _draw(blocks, maxima, list(drawn), list(drawn.values()), uniform)
        # The last block may be filled up, and a row that is not a number draws its last place.
        picked = picked.clamp(max=logits.shape[1] - 1)
        for i, token in zip(drawn, picked.tolist(), strict=True):
            tokens[i] = token
    if seeded:
        picked = _draw_seeded(
            logits[list(seeded)], list(seeded.values()), [positions[i] for i in seeded]
        )
        for i, token in zip(seeded, picked.tolist(), strict=True):
            tokens[i] = token
    candidates: dict[int, Candidates] = {}
    if rejection:
        draws = _draw_candidates(logits[list(rejection)], list(rejection.values()))
        for i, (token, candidates[i]) in zip(rejection, draws, strict=True):
            tokens[i] = token
    return Choices(tokens, candidates)


def _draw_seeded(
    logits: torch.Tensor, seeded: list[SeededSampling], positions: list[int]
) -> torch.Tensor:
    """Draw as the target would, were these its logits, float [n, vocab]: int64 [n]."""
    seeds = _column(seeded, "seed", torch.int64)
    draws = _filters(seeded)._replace(seeds=seeds, positions=torch.tensor(positions))
    temperatures = _temperatures([each.temperature for each in seeded])
    return sample_targets(logits.cpu(), temperatures, draws)


def _draw_candidates(
    logits: torch.Tensor, seeded: list[SeededSampling]
) -> list[tuple[int, Candidates]]:
    """Draw from the likeliest tokens that the target's filters leave, and tell of them all."""
    temperatures = _temperatures([each.temperature for each in seeded])
    probs = torch.softmax(logits.cpu().float() / temperatures.view(-1, 1), dim=-1)
    token_ids, left = likeliest_left(probs, _filters(seeded), MAX_CANDIDATES)
    left[(left > 0).sum(1) == 0, 0] = 1.0  # of a row that is not a number there is no draw
    rows = zip(token_ids.numpy(), left.double().numpy(), strict=True)
    return [_draw_from(ids[weights > 0], weights[weights > 0]) for ids, weights in rows]


def _draw_from(
    token_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[int, Candidates]:
    """The draw is one from the very numbers that are told."""
    probs = weights / weights.sum()
    steps = probs.cumsum()
    place = int(np.searchsorted(steps, _own_numbers.random() * steps[-1], side="right"))
    place = min(place, len(steps) - 1)  # where the number was rounded up to the sum
    return int(token_ids[place]), Candidates(token_ids.tolist(), probs.tolist())


def _filters(seeded: list[SeededSampling]) -> Draws:
    return Draws(
        _column(seeded, "top_k", torch.int64),
        _column(seeded, "top_p", torch.float32),
        _column(seeded, "min_p", torch.float32),
    )


def _column(seeded: list[SeededSampling], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(each, name) for each in seeded], dtype=dtype)


def _temperatures(wanted: Sequence[float]) -> torch.Tensor:
    """What each row is drawn with: float32 [n]."""
    return torch.tensor(wanted, dtype=torch.float32).clamp(max=MAX_TEMPERATURE)


def _likeliest(blocks: torch.Tensor, maxima: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The argmax of `rows`: int64 [len(rows)]. torch's own is fifty times slower on a CPU."""
    at = torch.tensor(rows, device=blocks.device)
    best = maxima[at].argmax(-1)
    return best * BLOCK + blocks[at, best].argmax(-1)


def _draw(
    blocks: torch.Tensor,
    maxima: torch.Tensor,
    rows: list[int],
    samplings: list[Sampling],
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Invert the distribution of `rows`, cut to their best blocks: int64 [len(rows)]."""
    scale = _temperatures([sampling.temperature for sampling in samplings])
    top_p = torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float32)
    at = torch.tensor(rows, device=blocks.device)[:, None]
    chosen = maxima[at[:, 0]].topk(min(BLOCKS, maxima.shape[1]), sorted=True).indices
    candidates = blocks[at, chosen].flatten(1)
    weights = candidates.sub_(candidates[:, :BLOCK].amax(-1, keepdim=True))
    weights = weights.div_(scale.to(weights.device)[:, None]).exp_()
    if any(sampling.top_p < 1 for sampling in samplings):
        _keep_nucleus(weights, top_p.to(weights.device))
    cumulative = weights.cumsum(-1)
    drawn = uniform.to(weights.device).float()[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=cumulative.shape[1] - 1)
    return (chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK)[:, 0]


def _keep_nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Set to 0 all `weights` [n, candidates] but the largest, which sum to `top_p` [n] of all.

    The largest one is kept in any case, and where `top_p` is 1 or more all of a row are.
    """
    cut = (top_p < 1).nonzero()[:, 0]
    part = weights[cut]
    ordered, order = part.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p[cut, None] * ordered.sum(-1, keepdim=True)
    outside[:, 0] = False
    weights[cut] = part.masked_fill(outside.scatter(-1, order, outside), 0.0)


def _blocks(logits: torch.Tensor) -> torch.Tensor:
    """`logits` [n, vocab] as float32 [n, blocks, BLOCK], the last block filled up with -inf."""
    logits = logits.float()  # maxima of bfloat16 are not vectorised on a CPU
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits.reshape(logits.shape[0], -1, BLOCK)
