"""Chooses how many tokens the next pass verifies of all requests, and gives them to the likeliest.

A ragged pass verifies a different number of tokens of each request, and its time depends on their
total. So a token of one request competes with the tokens of all others: `RowBudget` ranks the draft
tokens of the batch by their chances, and chooses the number of them with the most expected tokens
per second. This is the greedy selection of TETRIS (Wu et al. 2025, arXiv:2502.15197), with learnt
pass times instead of a given capacity. A draft token never ranks before its parent, so the best
tokens of a batch are the best tokens of each tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.policy.width import MARGIN, PASS_ROWS, Choice
from sglang_qspec.trie import DraftTrees

ROW_LADDER = (
    *range(1, 17),
    *range(20, 64, 4),
    *range(64, 128, 8),
    *range(128, 256, 16),
    *range(256, PASS_ROWS + 1, 32),
)
"""Totals of rows to choose from, besides all rows that the trees have. The list is short, so that
kernels and buffers see few shapes."""


@dataclass(frozen=True)
class RowChoice(Choice):
    """The number of tokens of each request, with the pass's expected tokens and seconds.

    `width` is the number of tokens of the request with the most.
    """

    lengths: NDArray[np.int64]
    """[bs]: number of tokens that the pass verifies of each request, at least 1."""

    def cut(self, trees: DraftTrees) -> DraftTrees:
        return trees.cut(self.lengths)


class RowBudget:
    """Chooses the rows of a pass: 1 (plain decoding) to `max_width` for each request.

    With `fixed` it always chooses all nodes of the trees, as far as the totals allow. A
    `WidthPolicy` has the same methods.
    """

    def __init__(
        self,
        max_width: int,
        *,
        times: PassTimes | None = None,
        fixed: bool = False,
        totals: Sequence[int] = (),
    ) -> None:
        self.times = times or PassTimes()
        self.fixed = fixed
        self.totals = totals
        """Totals in place of ROW_LADDER, in rising order, such as those with CUDA graphs; empty for
        ROW_LADDER. The last one is the maximum. A pass fills its total with draft tokens, as it
        would run padding otherwise."""
        self.limit(max_width)

    def limit(self, max_width: int) -> None:
        """Set the maximum of a request in later passes. Raises ConfigError if it is below 1."""
        if max_width < 1:
            raise ConfigError(f"max_width is {max_width}, but must be at least 1")
        self.max_width = max_width

    def choose(
        self,
        scores: NDArray[np.float32],
        factors: NDArray[np.float64] | None = None,
        *,
        longest: float = math.inf,
    ) -> RowChoice:
        """The rows of a pass over a batch.

        `scores` [bs, D] are the scores of the trees' nodes: the root first, then in falling order,
        0 for padding. `factors` [bs] multiply each request's scores (`Credit.factor`), by default
        with 1. Unless `fixed`, a pass with drafts is predicted to take at most `longest` times as
        long as one without (`Precedence`).
        """
        bs = len(scores)
        gains = scores[:, : self.max_width].astype(np.float64)
        if factors is not None:
            gains *= factors[:, None]
        order = _ranked(gains)
        tokens = bs + np.concatenate(([0.0], gains[:, 1:].ravel()[order].cumsum()))
        totals = self.totals or ROW_LADDER
        if self.fixed:
            drafts = min(len(order), max(0, totals[-1] - bs))
            return self._pass(gains, order, drafts, tokens)
        plain = self.times.seconds(bs, 1)
        best, rate = 0, MARGIN * bs / plain
        for drafts in _steps(bs, len(order), totals):
            seconds = self.times.seconds(bs, (bs + drafts) / bs)
            if tokens[drafts] / seconds > rate and seconds <= longest * plain:
                best, rate = drafts, tokens[drafts] / seconds
        if self.times.plain_is_due(bs):
            best = 0
        return self._pass(gains, order, best, tokens)

    def _pass(
        self,
        gains: NDArray[np.float64],
        order: NDArray[np.int64],
        drafts: int,
        tokens: NDArray[np.float64],
    ) -> RowChoice:
        """The pass over the first `drafts` draft tokens of `order` (`_ranked`)."""
        bs = len(gains)
        lengths = _lengths(gains, order[:drafts])
        width = int(lengths.max(initial=1))
        seconds = self.times.seconds(bs, (bs + drafts) / bs if drafts else 1)
        return RowChoice(width, float(tokens[drafts]), seconds, lengths)


def spend(gains: NDArray[np.float64], drafts: int) -> NDArray[np.int64]:
    """The number of tokens of each request [bs] if a pass verifies the best `drafts` draft tokens.

    `gains` [bs, D] are as the scores of `RowBudget.choose`, times the factors.
    """
    return _lengths(gains, _ranked(gains)[:drafts])


def _ranked(gains: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draft tokens with a gain, the best first, as flat places in `gains` without the roots."""
    flat = gains[:, 1:].ravel()
    # Stable, so that equal gains of one tree keep their order.
    return np.argsort(-flat, kind="stable")[: np.count_nonzero(flat > 0.0)]


def _lengths(gains: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    bs, width = gains.shape
    return 1 + np.bincount(chosen // max(1, width - 1), minlength=bs)


def _steps(bs: int, drafts: int, totals: Sequence[int]) -> list[int]:
    """Numbers of draft tokens to consider, of at most `drafts`, for a batch of `bs` requests."""
    most = min(bs + drafts, totals[-1])
    steps = [rows - bs for rows in totals if bs < rows < most]
    return [*steps, most - bs] if most > bs else steps
