"""The output of each request, including tokens that SGLang has not added to it yet.

With the overlap scheduler SGLang launches a pass before it processes the result of the last pass.
So `req.output_ids` lacks the tokens of the last pass when the worker prepares the next pass. The
request's record keeps them, and `output_of` appends them. Without the overlap scheduler
no tokens are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.engine.passes.request_record import record_of


def output_of(req: Any) -> Sequence[int]:
    """The output tokens of a request, including tokens that SGLang has not added yet."""
    output_ids: Sequence[int] = req.output_ids
    unadded = record_of(req).unadded
    if unadded is None or len(output_ids) != unadded[0]:
        return output_ids
    return Spliced(output_ids, unadded[1])


def outputs_of(reqs: Sequence[Any]) -> list[Sequence[int]]:
    """The output tokens of each request, including tokens that SGLang has not added yet."""
    return [output_of(req) for req in reqs]


def last_ids_of(reqs: Sequence[Any]) -> NDArray[np.int64]:
    """The last token of each request's output, or of its prompt: int64 [bs]."""
    outputs = zip(reqs, outputs_of(reqs), strict=True)
    return np.array([(output or req.origin_input_ids)[-1] for req, output in outputs], np.int64)


def check_lengths(
    reqs: Sequence[Any], output_lens: Sequence[int], seq_lens: torch.Tensor | None
) -> None:
    """Raise RuntimeError if an output has another length on the host than on the device.

    `seq_lens` int64 [bs] are SGLang's lengths of prompt and output without the last token, on the
    host; None skips the check. Two kinds of requests are not checked. For a prompt with images,
    SGLang may count tokens differently. For a request that has ended, SGLang may have dropped
    tokens, for example after the end of a grammar.
    """
    if seq_lens is None:
        return
    for req, output_len, seq_len in zip(reqs, output_lens, seq_lens.tolist(), strict=True):
        known = seq_len + 1 - len(req.origin_input_ids)
        if output_len != known and req.multimodal_inputs is None and not req.finished():
            raise RuntimeError(
                f"a request has {output_len} output tokens on the host, but {known} on the device"
            )


class Spliced(Sequence[int]):
    """The concatenation of two sequences, without a copy of the first."""

    def __init__(self, first: Sequence[int], second: Sequence[int]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        """One token, or a list of consecutive tokens."""
        before = len(self._first)
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ValueError(f"the step is {step}, but must be 1")
            late = slice(max(0, start - before), max(0, stop - before))
            return list(chain(self._first[start:stop], self._second[late]))
        place = range(len(self))[place]
        return self._first[place] if place < before else self._second[place - before]
