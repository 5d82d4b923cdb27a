"""Samples draft tokens from the logits of a batch, on their device, quickly and reproducibly.

Only the tokens and the candidates of step drafts are copied to the host: once for the tokens of a
batch, and once for its candidates.

A completion needs no exact distribution, so sampling covers only a part of the vocabulary. One pass
over the logits finds the maximum of each block of tokens, and the blocks with the largest maxima
are sampled from. They include the `BLOCKS` most likely tokens. On one core, 64 rows of 49,152
logits take about 2 ms. A softmax over all logits takes 7 ms and a top-k 14 ms.

Step drafts of sampled requests use the sampling of the target (`verify.sample`), which takes 16 ms
for the same logits. Sidecar and target then add the same noise, so they often sample the same
token. For rejection sampling a step draft is instead sampled from at most `MAX_CANDIDATES` tokens.
Its random numbers come from the operating system, because torch starts with the same seed in server
and sidecar.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.messages import MAX_CANDIDATES, Candidates, SeededSampling
from sglang_qspec.verify.sample import (
    ALL_RANKS,
    Draws,
    likeliest_left,
    rank_limit_of,
    sample_targets,
)

BLOCK = 64
"""Number of tokens in a block."""
BLOCKS = 32
"""Number of blocks that are sampled from."""
MAX_TEMPERATURE = 1e6
"""Higher temperatures are lowered to this one, which already makes sampling uniform. In float32 a
temperature above 3e38 is infinite, and would turn the padding of a block, -inf, into NaN."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one completion."""

    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens that are sampled from (nucleus sampling,
    Holtzman et al., 2020); 1 means all tokens. The probabilities are relative to the blocks that
    are sampled from, which hold nearly the whole probability."""


GREEDY = Sampling(0.0)

_rejection_rng = np.random.default_rng()
"""Random numbers for step drafts for rejection sampling, seeded by the operating system."""


class Choices(NamedTuple):
    """Sampled tokens of a batch."""

    token_ids: list[int]
    """Token of each row."""
    candidates: dict[int, Candidates]
    """Distribution that the token was sampled from, by row number. Only rows with
    `SeededSampling.probabilities` have an entry."""


def seed_of(token_ids: Sequence[int], completion: int) -> int:
    """Derive the seed of a completion from the prompt and the completion's number: 64 bits."""
    digest = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8)
    digest.update(completion.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Return a random number in [0, 1) for each pair of seed and position: float64 [n].

    The generator is SplitMix64 (Steele, Lea and Flood, 2014) with the position as its counter, so a
    number does not depend on the other rows of the batch.
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
    """Sample a token for each row of `logits`, float [n, vocab], with the other arguments' row i.

    A greedy row gets the lowest token id with the largest logit. The token of any other row is a
    function of its logits, sampling, seed and position, and does not depend on other rows. Rows
    with `SeededSampling.probabilities` ignore seed and position, and are random.
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
    rows: list[int] = []
    picked: list[torch.Tensor] = []
    if greedy or drawn:
        blocks = _blocks(logits)
        maxima = blocks.amax(-1)
    if greedy:
        rows += greedy
        picked.append(_likeliest(blocks, maxima, greedy))
    if drawn:
        rows += drawn
        uniform = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        places = _draw(blocks, maxima, list(drawn), list(drawn.values()), uniform)
        # A row of NaN selects the last position, which may be padding of the last block.
        picked.append(places.clamp(max=logits.shape[1] - 1))
    if seeded:
        rows += seeded
        picked.append(
            _draw_seeded(
                rows_of(logits, list(seeded)),
                list(seeded.values()),
                [positions[i] for i in seeded],
            )
        )
    tokens = [0] * len(samplings)
    if picked:
        for i, token in zip(rows, _on_host(torch.cat(picked)).tolist(), strict=True):
            tokens[i] = token
    candidates: dict[int, Candidates] = {}
    if rejection:
        draws = _draw_candidates(rows_of(logits, list(rejection)), list(rejection.values()))
        for i, (token, candidates[i]) in zip(rejection, draws, strict=True):
            tokens[i] = token
    return Choices(tokens, candidates)


def choose_shared(
    logits: torch.Tensor,
    samplings: Sequence[Sampling | SeededSampling],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_sizes: Sequence[int],
) -> Choices:
    """As `choose`, but the token of row i is one that its target has: below `vocab_sizes[i]`.

    Noise is hashed by token id, so target and sidecar add the same noise to the ids that both have.
    """
    rows_by_size: dict[int, list[int]] = {}
    for row, size in enumerate(vocab_sizes):
        rows_by_size.setdefault(min(size, logits.shape[1]), []).append(row)
    tokens = [0] * len(vocab_sizes)
    candidates: dict[int, Candidates] = {}
    for size, rows in rows_by_size.items():  # more than one only for servers of several targets
        chosen = choose(
            rows_of(logits, rows)[:, :size],
            [samplings[row] for row in rows],
            [seeds[row] for row in rows],
            [positions[row] for row in rows],
        )
        for place, row in enumerate(rows):
            tokens[row] = chosen.token_ids[place]
        candidates |= {rows[place]: each for place, each in chosen.candidates.items()}
    return Choices(tokens, candidates)


def rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows of `logits`, float [len(rows), vocab]; all of them without a copy."""
    return logits if rows == list(range(len(logits))) else logits[_put(torch.tensor(rows), logits)]


def _put(values: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`values`, a tensor of the host, on the device of `beside`, without a wait for the copy."""
    return values.to(beside.device, non_blocking=True)


def _on_host(values: torch.Tensor) -> NDArray[Any]:
    """`values` as an array of the host. Only this function of the file waits for the device."""
    return values.cpu().numpy()


def _draw_seeded(
    logits: torch.Tensor, seeded: list[SeededSampling], positions: list[int]
) -> torch.Tensor:
    """Sample from `logits`, float [n, vocab], as the target samples from its own: int64 [n]."""
    draws = _filters(seeded, logits)._replace(
        seeds=_put(_column(seeded, "seed", torch.int64), logits),
        positions=_put(torch.tensor(positions), logits),
    )
    temperatures = _put(_temperatures([each.temperature for each in seeded]), logits)
    return sample_targets(logits, temperatures, draws)


def _draw_candidates(
    logits: torch.Tensor, seeded: list[SeededSampling]
) -> list[tuple[int, Candidates]]:
    """Sample each row of `logits`, float [n, vocab], for rejection sampling by the target.

    Returns the token and the candidates of each row: the most likely tokens that pass the filters.
    """
    temperatures = _put(_temperatures([each.temperature for each in seeded]), logits)
    probs = torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)
    token_ids, left = likeliest_left(probs, _filters(seeded, logits), MAX_CANDIDATES)
    # One copy for both; float64 holds token ids exactly.
    ids, weights = _on_host(torch.stack((token_ids.double(), left.double())))
    weights[~(weights > 0).any(1), 0] = 1.0  # a row of NaN has no weight above 0
    rows = zip(ids.astype(np.int64), weights, strict=True)
    return [_draw_from(ids[weights > 0], weights[weights > 0]) for ids, weights in rows]


def _draw_from(
    token_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[int, Candidates]:
    """Sample a token from `weights`, and return it with the normalized weights as candidates."""
    probs = weights / weights.sum()
    steps = probs.cumsum()
    place = int(np.searchsorted(steps, _rejection_rng.random() * steps[-1], side="right"))
    place = min(place, len(steps) - 1)  # the product may round up to the sum
    return int(token_ids[place]), Candidates(token_ids.tolist(), probs.tolist())


def _filters(seeded: list[SeededSampling], logits: torch.Tensor) -> Draws:
    """The filters of each row, on the device of `logits`; None for one that no row has."""

    def column(name: str, without: float, dtype: torch.dtype) -> torch.Tensor | None:
        if all(getattr(each, name) == without for each in seeded):
            return None
        return _put(_column(seeded, name, dtype), logits)

    return Draws(
        column("top_k", ALL_RANKS, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        rank_limit=rank_limit_of(seeded),
    )


def _column(seeded: list[SeededSampling], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(each, name) for each in seeded], dtype=dtype)


def _temperatures(wanted: Sequence[float]) -> torch.Tensor:
    """Temperatures, each at most MAX_TEMPERATURE: float32 [n]."""
    return torch.tensor(wanted, dtype=torch.float32).clamp(max=MAX_TEMPERATURE)


def _likeliest(blocks: torch.Tensor, maxima: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The argmax of each of `rows`: int64 [len(rows)]; 50 times faster on a CPU than torch's."""
    at = _put(torch.tensor(rows), blocks)
    best = maxima[at].argmax(-1)
    return best * BLOCK + blocks[at, best].argmax(-1)


def _draw(
    blocks: torch.Tensor,
    maxima: torch.Tensor,
    rows: list[int],
    samplings: list[Sampling],
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Sample `rows` by inverse transform over the blocks with the largest maxima.

    `blocks` is float32 [n, blocks, BLOCK], `maxima` [n, blocks] its maxima, and `uniform` float64
    [len(rows)] in [0, 1). Returns token ids, int64 [len(rows)].
    """
    scale = _temperatures([sampling.temperature for sampling in samplings])
    at = _put(torch.tensor(rows), blocks)[:, None]
    chosen = maxima[at[:, 0]].topk(min(BLOCKS, maxima.shape[1]), sorted=True).indices
    candidates = blocks[at, chosen].flatten(1)
    weights = candidates.sub_(candidates[:, :BLOCK].amax(-1, keepdim=True))
    weights = weights.div_(_put(scale, weights)[:, None]).exp_()
    cut = [i for i, sampling in enumerate(samplings) if np.float32(sampling.top_p) < 1]
    if cut:
        top_p = torch.tensor([samplings[i].top_p for i in cut], dtype=torch.float32)
        _keep_nucleus(weights, _put(torch.tensor(cut), weights), _put(top_p, weights))
    cumulative = weights.cumsum(-1)
    drawn = _put(uniform, weights).float()[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=cumulative.shape[1] - 1)
    return (chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK)[:, 0]


def _keep_nucleus(weights: torch.Tensor, cut: torch.Tensor, top_p: torch.Tensor) -> None:
    """Set the weights outside the nucleus of the rows `cut` to 0, in place.

    `weights` is [n, candidates], `cut` int64 [m] and `top_p`, below 1, [m]. The nucleus always
    contains the largest weight.
    """
    part = weights[cut]
    ordered, order = part.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p[:, None] * ordered.sum(-1, keepdim=True)
    outside[:, 0] = False
    weights[cut] = part.masked_fill(outside.scatter(-1, order, outside), 0.0)


def _blocks(logits: torch.Tensor) -> torch.Tensor:
    """Reshape `logits` [n, vocab] to float32 [n, blocks, BLOCK]; -inf pads the last block."""
    logits = logits.float()  # torch does not vectorize maxima of bfloat16 on a CPU
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits.reshape(logits.shape[0], -1, BLOCK)
