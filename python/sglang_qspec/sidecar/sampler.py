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

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.messages import MAX_CANDIDATES, Candidates, SeededSampling
from sglang_qspec.sidecar.sampling import Sampling, uniforms
from sglang_qspec.transfers import HostCopy, to_device
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

_GREEDY, _DRAWN, _SEEDED, _REJECTION = _KINDS = ("greedy", "drawn", "seeded", "rejection")
"""How a row is sampled: greedily, from the likeliest blocks of tokens with `uniforms`, as the
target samples, or for rejection sampling by the target."""

_rejection_rng = np.random.default_rng()
"""Random numbers for step drafts for rejection sampling, seeded by the operating system."""


class Choices(NamedTuple):
    """Sampled tokens of a batch."""

    token_ids: list[int]
    """Token of each row."""
    candidates: dict[int, Candidates]
    """Distribution that the token was sampled from, by row number. Only rows with
    `SeededSampling.probabilities` have an entry."""
    second_ids: dict[int, int]
    """Second likeliest token of each greedy row, by row number; empty unless they are asked for."""


def choose(
    logits: torch.Tensor,
    samplings: Sequence[Sampling | SeededSampling],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_sizes: Sequence[int] | None = None,
    *,
    seconds: bool = False,
) -> Choices:
    """Sample a token for each row of `logits`, float [n, vocab]; `Sampler` has the arguments."""
    return Sampler(samplings, seeds, positions, vocab_sizes, seconds=seconds).choose(logits)


class Sampler:
    """Samples a token for each of n rows, in one pass of the draft model or in several.

    A greedy row gets the lowest token id with the largest logit. The token of any other row is a
    function of its logits, sampling, seed and position, and does not depend on other rows. Rows
    with `SeededSampling.probabilities` ignore seed and position, and are random. The noise of
    other seeded rows is hashed by token id, so target and sidecar add the same noise to the ids
    that both have.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling | SeededSampling],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocab_sizes: Sequence[int] | None = None,
        passes: int = 1,
        *,
        seconds: bool = False,
    ) -> None:
        """Prepare the sampling of rows in `passes` passes.

        The position of row i is `positions[i]` in the first pass, and rises by one in each. Its
        token is below `vocab_sizes[i]`, so that its target has it; None means all tokens. With
        `seconds`, `choices` has the second likeliest tokens of greedy rows.
        """
        self._count = len(samplings)
        self._rows: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        """The rows of each kind, in rising order."""
        for row, sampling in enumerate(samplings):
            self._rows[_kind_of(sampling)].append(row)
        self._seconds = seconds
        self._second: torch.Tensor | None = None
        """Second likeliest tokens of the greedy rows of the latest pass, if they are asked for."""
        self._vocab_size = None if vocab_sizes is None else max(vocab_sizes)
        self._host: dict[str, NDArray[Any]] = {}
        self._device: dict[str, torch.Tensor] = {}
        self._rank_limits: dict[str, int | None] = {}
        self._cut = np.empty(0, np.int64)
        """The places of rows with a top_p among the drawn rows."""
        if vocab_sizes is not None and min(vocab_sizes) != self._vocab_size:
            self._host["sizes"] = np.array(vocab_sizes, np.int64)
        for kind, rows in self._rows.items():
            if not rows:
                continue
            if len(rows) < self._count:
                self._host[kind] = np.array(rows, np.int64)
            if kind is _GREEDY:
                continue
            own: list[Any] = [samplings[row] for row in rows]
            most = np.minimum([each.temperature for each in own], MAX_TEMPERATURE)
            self._host[f"{kind} temperatures"] = most.astype(np.float32)
            at = np.array([positions[row] for row in rows]) + np.arange(passes)[:, None]
            if kind is _DRAWN:
                self._host["uniform"] = uniforms([seeds[row] for row in rows], at)
                top_ps = np.array([each.top_p for each in own], np.float32)
                self._cut = np.flatnonzero(top_ps < 1)
                if len(self._cut):
                    self._host |= {"cut": self._cut, "top_ps": top_ps[self._cut]}
                continue
            self._rank_limits[kind] = rank_limit_of(own)
            for name, (without, dtype) in _FILTERS.items():
                values = [getattr(each, name) for each in own]
                if any(value != without for value in values):
                    self._host[f"{kind} {name}"] = np.array(values, dtype)
            if kind is _SEEDED:
                self._host["seeds"] = np.array([each.seed for each in own], np.int64)
                self._host["positions"] = at

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What `put` needs on the device of the logits."""
        return list(self._host.values())

    def put(self, arrays: Sequence[torch.Tensor]) -> None:
        """Take `arrays` on the device of the logits, before the first call of `draw`."""
        self._device = dict(zip(self._host, arrays, strict=True))

    def draw(self, logits: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Sample the rows of pass `number` from `logits`, float [m, vocab]: int64 [m].

        They are the first m rows. The token of a row with `SeededSampling.probabilities` is 0.
        """
        count = len(logits)
        logits = self._allowed(logits)
        found: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        if self._rows[_GREEDY] or self._rows[_DRAWN]:
            blocks = _blocks(logits)
            maxima = blocks.amax(-1)
        most, at = self._first(_GREEDY, count)
        if most:
            likeliest = _likeliest(blocks, maxima, at)
            found.append((at, likeliest))
            if self._seconds:
                seconds = _second_likeliest(blocks, maxima, at, likeliest)
                self._second = self._within(seconds.clamp(max=logits.shape[1] - 1), at)
        most, at = self._first(_DRAWN, count)
        if most:
            places = self._inverse(blocks, maxima, at, most, number)
            # A row of NaN selects the last position, which may be padding of the last block.
            found.append((at, places.clamp(max=logits.shape[1] - 1)))
        most, at = self._first(_SEEDED, count)
        if most:
            draws = self._filters(_SEEDED, most)._replace(
                seeds=self._device["seeds"][:most],
                positions=self._device["positions"][number, :most],
            )
            temperatures = self._device[f"{_SEEDED} temperatures"][:most]
            found.append((at, sample_targets(_at(logits, at), temperatures, draws)))
        if len(found) == 1 and found[0][0] is None:
            return self._within(found[0][1])
        tokens = torch.zeros(count, dtype=torch.int64, device=logits.device)
        for at, drawn in found:
            assert at is not None
            tokens[at] = drawn
        return self._within(tokens)

    def choose(self, logits: torch.Tensor) -> Choices:
        """Sample all rows in one pass, from `logits` float [n, vocab]."""
        self.put(to_device(logits.device, *self.arrays))
        return self.choices(self.draw(logits), logits)

    def choices(self, tokens: torch.Tensor, logits: torch.Tensor) -> Choices:
        """The tokens that `draw` gave for all rows in one pass, with those that it left out.

        `tokens` are int64 [n], and `logits`, float [n, vocab], those of the pass.
        """
        if self._second is not None:
            tokens = torch.cat((tokens, self._second))
        copied: list[int] = _on_host(tokens).tolist()
        token_ids, second_ids = copied[: self._count], copied[self._count :]
        candidates: dict[int, Candidates] = {}
        rows = self._rows[_REJECTION]
        if rows:
            at = self._first(_REJECTION, self._count)[1]
            drawn = self._draw_candidates(_at(self._allowed(logits), at))
            for row, (token, each) in zip(rows, drawn, strict=True):
                token_ids[row], candidates[row] = token, each
        greedy = [] if self._second is None else self._rows[_GREEDY]
        return Choices(token_ids, candidates, dict(zip(greedy, second_ids, strict=True)))

    def _first(self, kind: str, count: int) -> tuple[int, torch.Tensor | None]:
        """The number of rows of this kind among the first `count`, and these: int64 [n].

        They are None if all rows are of this kind.
        """
        rows = self._rows[kind]
        if len(rows) == self._count:
            return count, None
        most = bisect.bisect_left(rows, count)
        return most, self._device[kind][:most] if most else None

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` of the tokens that the targets have."""
        logits = logits[:, : self._vocab_size]
        if "sizes" not in self._device:  # sizes differ only among servers of several targets
            return logits
        token_ids = torch.arange(logits.shape[1], device=logits.device)
        sizes = self._device["sizes"][: len(logits), None]
        return logits.masked_fill(token_ids >= sizes, float("-inf"))

    def _within(self, tokens: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        """`tokens`, int64 [m], of the rows `at`; None for the first m.

        Those of rows of NaN may be outside of the row's vocabulary.
        """
        if "sizes" not in self._device:
            return tokens
        return torch.minimum(tokens, _at(self._device["sizes"], at)[: len(tokens)] - 1)

    def _filters(self, kind: str, most: int) -> Draws:
        """The filters of the first rows of this kind; None for one that no row has."""

        def column(name: str) -> torch.Tensor | None:
            values = self._device.get(f"{kind} {name}")
            return None if values is None else values[:most]

        top_ks, top_ps, min_ps = map(column, _FILTERS)
        return Draws(top_ks, top_ps, min_ps, rank_limit=self._rank_limits[kind])

    def _inverse(
        self,
        blocks: torch.Tensor,
        maxima: torch.Tensor,
        at: torch.Tensor | None,
        most: int,
        number: int,
    ) -> torch.Tensor:
        """Sample the first `most` drawn rows, which are `at` in the pass, by inverse transform.

        `blocks` is float32 [n, blocks, BLOCK], and `maxima` [n, blocks] its maxima. The blocks with
        the largest maxima are sampled from. Returns token ids, int64 [most].
        """
        rows = torch.arange(most, device=blocks.device) if at is None else at
        chosen = _at(maxima, at).topk(min(BLOCKS, maxima.shape[1]), sorted=True).indices
        candidates = blocks[rows[:, None], chosen].flatten(1)
        weights = candidates.sub_(candidates[:, :BLOCK].amax(-1, keepdim=True))
        scale = self._device[f"{_DRAWN} temperatures"][:most]
        weights = weights.div_(scale[:, None]).exp_()
        cut = int(np.searchsorted(self._cut, most))
        if cut:
            _keep_nucleus(weights, self._device["cut"][:cut], self._device["top_ps"][:cut])
        cumulative = weights.cumsum(-1)
        uniform = self._device["uniform"][number, :most]
        drawn = uniform.float()[:, None] * cumulative[:, -1:]
        place = torch.searchsorted(cumulative, drawn, right=True)
        place = place.clamp_(max=cumulative.shape[1] - 1)
        return (chosen.gather(1, place // BLOCK) * BLOCK + place % BLOCK)[:, 0]

    def _draw_candidates(self, logits: torch.Tensor) -> list[tuple[int, Candidates]]:
        """Sample from `logits`, float [n, vocab], for rejection sampling by the target.

        Returns the token and the candidates of each row: the most likely tokens that pass the
        filters.
        """
        temperatures = self._device[f"{_REJECTION} temperatures"]
        probs = torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)
        filters = self._filters(_REJECTION, len(logits))
        token_ids, left = likeliest_left(probs, filters, MAX_CANDIDATES)
        # One copy for both; float64 holds token ids exactly.
        ids, weights = _on_host(torch.stack((token_ids.double(), left.double())))
        weights[~(weights > 0).any(1), 0] = 1.0  # a row of NaN has no weight above 0
        rows = zip(ids.astype(np.int64), weights, strict=True)
        return [_draw_from(ids[weights > 0], weights[weights > 0]) for ids, weights in rows]


_FILTERS: dict[str, tuple[float, type[np.number[Any]]]] = {
    "top_k": (ALL_RANKS, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
}
"""The filters in the order of `Draws`, each with the value that keeps all tokens and its type."""


def _kind_of(sampling: Sampling | SeededSampling) -> str:
    if isinstance(sampling, SeededSampling):
        return _REJECTION if sampling.probabilities else _SEEDED
    return _DRAWN if sampling.temperature > 0 else _GREEDY


def _at(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The given rows of `values`, all of them without a copy if it is None."""
    return values if rows is None else values[rows]


def _on_host(values: torch.Tensor) -> NDArray[Any]:
    """`values` as an array of the host. Only this function of the file waits for the device."""
    return HostCopy(values).read()


def _draw_from(
    token_ids: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[int, Candidates]:
    """Sample a token from `weights`, and return it with the normalized weights as candidates."""
    probs = weights / weights.sum()
    steps = probs.cumsum()
    place = int(np.searchsorted(steps, _rejection_rng.random() * steps[-1], side="right"))
    place = min(place, len(steps) - 1)  # the product may round up to the sum
    return int(token_ids[place]), Candidates(token_ids.tolist(), probs.tolist())


def _likeliest(
    blocks: torch.Tensor, maxima: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """The argmax of `rows`, None for all: int64 [len(rows)]; on a CPU 50 times torch's speed."""
    best = _at(maxima, rows).argmax(-1)
    if rows is None:
        rows = torch.arange(len(best), device=best.device)
    return best * BLOCK + blocks[rows, best].argmax(-1)


def _second_likeliest(
    blocks: torch.Tensor,
    maxima: torch.Tensor,
    rows: torch.Tensor | None,
    likeliest: torch.Tensor,
) -> torch.Tensor:
    """The argmax of `rows`, None for all, without their `likeliest` tokens: int64 [len(rows)]."""
    best, place = likeliest // BLOCK, likeliest % BLOCK
    if rows is None:
        rows = torch.arange(len(best), device=best.device)
    left = blocks[rows, best].scatter(1, place[:, None], float("-inf"))
    others = maxima[rows].scatter(1, best[:, None], left.amax(-1, keepdim=True))
    second = others.argmax(-1)
    inside = torch.where(second == best, left.argmax(-1), blocks[rows, second].argmax(-1))
    return second * BLOCK + inside


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
