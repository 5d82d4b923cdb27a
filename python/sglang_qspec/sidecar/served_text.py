"""Owns what a head has of the text of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar.sampling import Sampling


@dataclass(eq=False)
class ServedText:
    """The text of a request, and what the head has of it. Positions are in tokens."""

    token_ids: array[int]
    """Prompt and committed output."""
    prompt_len: int
    """Length of the text without its output."""
    sampling: Sampling | SeededSampling
    stops: frozenset[int]
    begin: int = 0
    """Position of the first state."""
    read: int = 0
    """Position behind the last state that the head has read."""
    states: list[NDArray[np.int16]] = field(default_factory=list)
    """The states from `read` on: bfloat16 as int16 [tokens, width] each."""
    row: int | None = None
    """KV row; None before the first state is read."""
    lookahead: int = 0
    """Number of tokens to draft; 0 once they are drafted."""
    drafts: int = 0
    """Number of drafts so far."""

    @property
    def known(self) -> int:
        """Position behind the last state that the server has sent."""
        return self.read + sum(map(len, self.states))

    @property
    def readable(self) -> int:
        """Number of states that can be read: those with a known token behind them."""
        return max(0, min(self.known, len(self.token_ids) - 1) - self.read)

    @property
    def is_complete(self) -> bool:
        """Whether there is a state for each token but the newest."""
        return self.known >= len(self.token_ids) - 1 > self.begin

    @property
    def output_len(self) -> int:
        """Length of the committed output."""
        return len(self.token_ids) - self.prompt_len

    def take(self, count: int) -> NDArray[np.int16]:
        """Remove the next `count` states, and return them."""
        all_of_them = np.concatenate(self.states)
        self.states = [all_of_them[count:]] if count < len(all_of_them) else []
        return all_of_them[:count]
