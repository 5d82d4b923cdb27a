"""The requests of one pass after the other, and what does not change while they run together.

While no request comes or goes, passes without drafts differ only in their tokens. So the host asks
the requests once, and not before each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.engine.passes import tracing
from sglang_qspec.guess_tags import GUESS_IDS_KEY
from sglang_qspec.policy import AnswerKind


class Lineup:
    """The requests `reqs` of a pass, in its order."""

    def __init__(self, reqs: Sequence[Any]) -> None:
        self.reqs = list(reqs)
        self.rids = [req.rid for req in reqs]
        self.seeds: Any = None
        """What `sample.seeds` keeps on the device for the draws of all passes."""

    def of(self, reqs: Sequence[Any]) -> Lineup:
        """The lineup of `reqs`: this one if they are the same requests in the same order."""
        return self if reqs == self.reqs else Lineup(reqs)

    @cached_property
    def prompt_lens(self) -> NDArray[np.int64]:
        """int64 [bs]: length of each prompt in tokens."""
        return np.array([len(req.origin_input_ids) for req in self.reqs], np.int64)

    @cached_property
    def kind(self) -> AnswerKind:
        """The kind of answers of most requests."""
        return AnswerKind.of_batch([_kind_of(req) for req in self.reqs])

    @cached_property
    def has_images(self) -> bool:
        """Whether a prompt has images, of which SGLang may count the tokens differently."""
        return any(req.multimodal_inputs is not None for req in self.reqs)

    @cached_property
    def has_traces(self) -> bool:
        """Whether a request asks for a trace."""
        return tracing.PassTrace.of(self.reqs) is not None

    @cached_property
    def has_records(self) -> bool:
        """Whether a request may ask for labels of its tokens, or for a trace."""
        return any(req.customized_info for req in self.reqs)


def _kind_of(req: Any) -> AnswerKind:
    """The kind of the answer to a request of SGLang."""
    sampling = req.sampling_params
    if (sampling.custom_params or {}).get(GUESS_IDS_KEY):
        return AnswerKind.GUESSED
    if req.grammar is not None:
        return AnswerKind.GRAMMAR
    # SGLang's form of temperature 0 is a top_k of 1.
    return AnswerKind.GREEDY if sampling.top_k == 1 else AnswerKind.SAMPLED


@dataclass
class KnownLens:
    """What the host knows of the texts of a batch before the last pass over them is complete."""

    seq_lens: torch.Tensor
    """int64 [bs] on the host: the length of each text without its last token, as SGLang counts."""
    total: int
    """The sum of `seq_lens`."""
    in_place: bool
    """Whether the last pass was over the same requests in the same order, so that its own tensors
    on the device are what the next pass reads."""

    @cached_property
    def after(self) -> KnownLens:
        """The same after a pass without drafts over these requests, in this order."""
        return KnownLens(self.seq_lens + 1, self.total + len(self.seq_lens), in_place=True)
