"""Sampling on a GPU, with fake tensors: no mixed devices, and few and small copies to the host.

Sampling as the target does is replaced, because `verify` has tests of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.messages import MAX_CANDIDATES, SeededSampling
from sglang_qspec.sidecar import sampler
from sglang_qspec.sidecar.sampling import GREEDY, Sampling
from test.verify.fake_cuda import fake_cuda

VOCAB = 128_000
ROWS = 64
SEEDED = SeededSampling(7, 0.9, top_p=0.9)
REJECTION = SeededSampling(7, 0.9, probabilities=True)


@dataclass
class Copies:
    """Sizes of the copies to the host, in bytes."""

    sizes: list[int] = field(default_factory=list)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """A mode with fake CUDA tensors, which counts the copies to the host."""
    found = Copies()

    def on_host(values: torch.Tensor) -> Any:
        assert values.is_cuda
        found.sizes.append(values.numel() * values.element_size())
        return np.ones(tuple(values.shape), dtype=np.dtype(str(values.dtype)[len("torch.") :]))

    monkeypatch.setattr(sampler, "_on_host", on_host)
    with fake_cuda() as costs:
        yield found
        assert not costs.synchronisations


def choose(samplings: Sequence[Sampling | SeededSampling]) -> sampler.Choices:
    logits = torch.empty(len(samplings), VOCAB, dtype=torch.bfloat16, device="cuda")
    count = len(samplings)
    return sampler.choose(logits, samplings, range(count), [5] * count)


@pytest.mark.parametrize(
    "samplings",
    [
        [GREEDY] * ROWS,
        [Sampling(0.7)] * ROWS,
        [Sampling(0.7, 0.9)] * ROWS,
        [SEEDED] * ROWS,
        [GREEDY, Sampling(0.7), Sampling(0.7, 0.9), SEEDED] * (ROWS // 4),
    ],
    ids=["greedy", "drawn", "nucleus", "seeded", "mixed"],
)
def test_the_tokens_of_a_batch_are_copied_to_the_host_once_and_logits_never(
    copies: Copies, samplings: list[Sampling | SeededSampling]
) -> None:
    assert choose(samplings).token_ids == [1] * ROWS
    assert copies.sizes == [8 * ROWS]


def test_candidates_are_copied_once_for_all_rows_and_logits_never(copies: Copies) -> None:
    chosen = choose([REJECTION, GREEDY, SEEDED, REJECTION])
    assert sorted(chosen.candidates) == [0, 3]
    assert copies.sizes == [4 * 8, 2 * 2 * MAX_CANDIDATES * 8]
