"""The costs of a verify pass for the host on CUDA: transfers, their bytes, and synchronisations.

Fake CUDA tensors have shapes and devices, but no values (`test.verify.fake_cuda`). SGLang's kernel
that accepts is replaced, because it cannot run without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.sample import output_counts
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.penalties import read_outputs
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.verify.rejection import Proposals
from test.engine.passes.fake_batches import VOCAB, WIDTH, Req, info_of, trees_of, without_kernels
from test.verify.fake_cuda import CUDA, Costs, fake_cuda, new_fakes

LONG = 32_768
PENALIZED = {"frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with without_kernels(monkeypatch):
        yield


def verify(
    reqs: list[Req],
    *,
    length: int = 100,
    full_mask: bool = True,
    rejecting: bool = False,
    ragged: bool = False,
    fakes: FakeTensorMode | None = None,
) -> Costs:
    """The costs of a verify pass without the model: from the trees to the accepted tokens."""
    count = len(reqs)
    trees = trees_of(count)
    if ragged:
        trees = trees.cut(trees.sizes.astype(np.int64))
    known = torch.ones(trees.rows, dtype=torch.bool)
    offered = torch.zeros(trees.rows, 4, dtype=torch.int64)
    proposals = Proposals(known, offered[:, 0].clone(), offered, torch.ones(trees.rows, 4))
    # The host reads True where the pass asks whether the shortlist suffices.
    with fake_cuda(True, fakes) as costs:
        info, seq_lens = info_of(reqs), torch.zeros(count, dtype=torch.int64, device=CUDA)
        batch: Any = SimpleNamespace(
            reqs=reqs, sampling_info=info, forward_mode=ForwardMode.DECODE, seq_lens=seq_lens
        )
        verify_input = verify_input_of(
            trees, seq_lens, CUDA, full_mask=full_mask, total_len=count * length
        )
        assert {verify_input.custom_mask.device, verify_input.positions.device} == {CUDA}
        width = trees.width
        columns = length + width if full_mask and not ragged else width
        assert verify_input.custom_mask.shape == (count * width * columns,)
        logits = torch.rand(trees.rows, VOCAB, device=CUDA)
        output: Any = SimpleNamespace(next_token_logits=logits)
        given = proposals if rejecting else None
        group = SimpleNamespace(world_size=1)
        with sampling_seeds.seeded_draws(batch, given), get_parallel().override(tp_group=group):
            result = sample_and_accept(verify_input, batch, output)
        assert {values.device for values in result} == {CUDA}
        # The accepted tokens; their values are fake too.
        flat = torch.cat([values.flatten() for values in result]).cpu()
        assert flat.shape == (count * (2 * width + 1),)
    return costs


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("rejecting", [False, True])
@pytest.mark.parametrize(("full_mask", "ragged"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("params", SAMPLED)
def test_a_pass_has_two_transfers_and_at_most_one_synchronisation(
    params: dict[str, Any], full_mask: bool, ragged: bool, rejecting: bool
) -> None:
    reqs = [Req(params) for _ in range(3)]
    costs = verify(reqs, full_mask=full_mask, rejecting=rejecting, ragged=ragged)
    assert len(costs.uploads) == (1 if params["temperature"] == 0 else 2)
    assert costs.pinned == len(costs.uploads)
    assert len(costs.synchronisations) <= 1


@pytest.mark.parametrize("ragged", [False, True])
def test_a_mixed_batch_with_penalties_has_three_transfers(ragged: bool) -> None:
    reqs = [Req({**params, **PENALIZED}) for params in SAMPLED[:3]] + [Req({"min_new_tokens": 9})]
    costs = verify(reqs, ragged=ragged)
    assert len(costs.uploads) == 3
    assert len(costs.synchronisations) == 1


def test_the_bytes_of_a_pass_do_not_grow_with_the_texts() -> None:
    reqs = [Req({"temperature": 1.0, **PENALIZED}) for _ in range(64)]
    for req in reqs:
        req.output_ids = list(range(VOCAB)) * (LONG // VOCAB)
    fakes = new_fakes()  # the device keeps the counts of the outputs
    first = sum(verify(reqs, length=LONG, fakes=fakes).uploads)
    for req in reqs:
        req.output_ids += [9] * WIDTH
    later = sum(verify(reqs, length=LONG, fakes=fakes).uploads)
    assert later < 64 * 1024
    # The first pass after a start sends each distinct output token once.
    assert first < 64 * VOCAB * 32 + 64 * 1024


def test_a_plain_pass_with_penalties_stays_on_the_device() -> None:
    with fake_cuda() as costs:
        reqs = [Req(PENALIZED), Req({})]
        info: Any = SimpleNamespace(acc_additive_penalties=object(), acc_scaling_penalties=None)
        batch: Any = SimpleNamespace(reqs=reqs, sampling_info=info)
        read_outputs(batch)
        info.penalizer_orchestrator.apply(torch.rand(2, VOCAB, device=CUDA))
    assert len(costs.uploads) == 1
    assert not costs.synchronisations


def test_the_sampler_of_plain_passes_draws_on_the_device() -> None:
    reqs = [Req({"temperature": 1.0, "top_k": 20, "top_p": 0.95}) for _ in range(3)]
    with fake_cuda() as costs:
        info = info_of(reqs)
        batch: Any = SimpleNamespace(reqs=reqs, sampling_info=info)
        with sampling_seeds.seeded_draws(batch):
            positions = torch.zeros(3, dtype=torch.int64, device=CUDA)
            drawn: Tensor
            probs = torch.rand(3, VOCAB, device=CUDA)
            drawn, _ = Sampler._sample_from_probs(None, probs, info, positions, False)
        assert drawn.device == CUDA
    assert len(costs.uploads) == 1
    assert not costs.synchronisations


def test_the_counts_of_outputs_stay_on_the_device() -> None:
    with fake_cuda() as costs:
        counts = output_counts.OutputCounts(CUDA)
        changes = counts.read([Req({})])
        slots, entries = torch.from_numpy(changes.slots), torch.from_numpy(changes.entries)
        used = torch.from_numpy(changes.used)
        found = counts.write(slots.to(CUDA), entries.to(CUDA), used.to(CUDA), 3)
        assert {values.device for values in found} == {CUDA}
    assert not costs.synchronisations
