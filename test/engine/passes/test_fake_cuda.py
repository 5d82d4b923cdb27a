"""The costs of a verify pass for the host on CUDA: transfers, their bytes, and synchronisations.

Fake CUDA tensors have shapes and devices, but no values (`test.verify.fake_cuda`). SGLang's kernel
that accepts is replaced, because it cannot run without a GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_qspec import transfers
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.passes import tracing, worker
from sglang_qspec.engine.passes.launch.prefill import _drafts_of, with_drafts
from sglang_qspec.engine.passes.launch.relay import relayed
from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput, verify_input_of
from sglang_qspec.engine.passes.launcher import Launcher
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.outcome import ComingOutcome
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.sample import output_counts, penalties, sample
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.penalties import read_outputs
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.engine.ranks import PassOrder, RankGroup
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PipelinePlan
from sglang_qspec.trie import DraftTrees, Source
from sglang_qspec.verify.rejection import Proposals
from test.engine.speculating import enqueue, make
from test.verify.fake_cuda import CUDA, Costs, fake_cuda, new_fakes

WIDTH, VOCAB, LONG = 8, 2000, 32_768
PENALIZED = {"frequency_penalty": 0.5, "repetition_penalty": 1.2}


class Req:
    """The part of SGLang's request that a pass reads."""

    eos_token_ids = frozenset({5})
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    origin_input_ids = (0,) * 98
    multimodal_inputs = customized_info = None

    def __init__(self, params: dict[str, Any]) -> None:
        self.sampling_params = SamplingParams(**params)
        self.sampling_params.normalize(self.tokenizer)
        self.rid = "a"
        self.output_ids = [1, 2, 3]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sampling seeds as on a server, and doubles for the kernels that need a real GPU."""
    sample_from_probs = Sampler._sample_from_probs
    sampling_seeds.install()
    monkeypatch.setattr(sample, "verify_tree_greedy_func", lambda **_tensors: None)
    monkeypatch.setattr(sample, "sanitize_nan_logits", lambda *_: None)
    yield
    Sampler._sample_from_probs = sample_from_probs
    penalties._counts_on.cache_clear()


def trees_of(count: int) -> DraftTrees:
    """Chains of different sizes."""
    shape = (count, WIDTH)
    chain = np.maximum(np.arange(WIDTH, dtype=np.int32) - 1, 0)
    return DraftTrees(
        np.full(shape, 7, np.int32),
        np.broadcast_to(chain, shape).copy(),
        np.full(shape, Source.STEP, np.uint8),
        np.ones(shape, np.float32),
        (1 + np.arange(count, dtype=np.int32) % WIDTH),
    )


def info_of(reqs: list[Req]) -> SamplingBatchInfo:
    """The parameters on the device, as SGLang uploads them when the batch changes."""
    count, params = len(reqs), [req.sampling_params for req in reqs]
    return SamplingBatchInfo(
        temperatures=torch.ones(count, 1, device=CUDA),
        top_ps=torch.ones(count, device=CUDA),
        top_ks=torch.ones(count, dtype=torch.int32, device=CUDA),
        min_ps=torch.zeros(count, device=CUDA),
        is_all_greedy=all(p.top_k == 1 for p in params),
        is_any_greedy=any(p.top_k == 1 for p in params),
        need_top_p_sampling=any(p.top_p < 1 for p in params),
        need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        vocab_size=VOCAB,
        return_sampling_masks=[False] * count,
    )


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
def test_a_pass_has_two_transfers_and_at_most_two_synchronisations(
    params: dict[str, Any], full_mask: bool, ragged: bool, rejecting: bool
) -> None:
    reqs = [Req(params) for _ in range(3)]
    costs = verify(reqs, full_mask=full_mask, rejecting=rejecting, ragged=ragged)
    assert len(costs.uploads) == (1 if params["temperature"] == 0 else 2)
    assert costs.pinned == len(costs.uploads)
    assert len(costs.synchronisations) <= 2


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


class Target:
    """A target whose passes give logits, or a token for each request."""

    def get_memory_pool(self) -> tuple[None, None]:
        return None, None

    def forward_batch_generation(self, batch: Any, is_verify: bool = False) -> Any:
        rows = len(batch.input_ids)
        output = SimpleNamespace(
            next_token_logits=torch.rand(rows, VOCAB, device=CUDA), hidden_states=None
        )
        token_ids = None if is_verify else torch.zeros(rows, dtype=torch.int64, device=CUDA)
        return SimpleNamespace(
            logits_output=output, next_token_ids=token_ids, can_run_cuda_graph=True
        )


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches of the passes that moved KV to the accepted paths."""
    moved: list[Any] = []
    monkeypatch.setattr(TreeVerifyInput, "move_accepted", lambda _, batch, *__: moved.append(batch))
    monkeypatch.setattr(transfers, "_event", lambda _: None)
    return moved


@pytest.fixture
def active() -> Iterator[Speculator]:
    made = make(None)
    speculation.activate(made)
    enqueue(made, "a", prompt_ids=[0] * 98, output_ids=[1, 2, 3])
    yield made
    speculation.deactivate()


def without_waits(proposal: Proposal) -> Generator[float, bool, Proposal]:
    """What a proposer does that needs no wait for its proposal."""
    yield from ()
    return proposal


def launch(active: Speculator, reqs: list[Req], trees: DraftTrees) -> tuple[Costs, Pass]:
    """The costs of a pass of a server with overlap, and the launched pass."""
    speculates: Any = object.__new__(worker.QSpecWorker)
    speculates._overlap = True
    speculates._device = "cuda"
    speculates._ranks = RankGroup()
    leader: Any = object.__new__(Leader)
    leader.speculator = active
    leader.accounting = SimpleNamespace(begin=lambda _: None)
    leader._proposer = SimpleNamespace(
        propose=lambda *_, **__: without_waits(Proposal(trees, trees))
    )
    target: Any = Target()
    graphs = PassGraphs(None, QSpecConfig())
    speculates._launcher = Launcher(target, graphs, leader, widest=WIDTH, overlap=True)
    launched: list[Pass] = []
    speculates._settlement = SimpleNamespace(add=launched.append)
    count = len(reqs)
    with fake_cuda() as costs, get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        lens = torch.zeros(count, dtype=torch.int64, device=CUDA)
        ones = torch.ones(count, dtype=torch.int32, device=CUDA)
        batch: Any = SimpleNamespace(
            reqs=reqs,
            device=CUDA,
            sampling_info=info_of(reqs),
            forward_mode=ForwardMode.DECODE,
            seq_lens=lens,
            orig_seq_lens=lens,
            seq_lens_cpu=np.full(count, 100),
            req_pool_indices=lens,
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.zeros(9, 99, dtype=torch.int32, device=CUDA)
            ),
            return_logprob=False,
            has_grammar=False,
            spec_info=relayed(lens, ones, lens, WIDTH),
        )
        traced = tracing.PassTrace.of(reqs)
        proposal = leader._propose(batch, PipelinePlan("queue", WIDTH), traced)
        order = PassOrder(trees if trees.width > 1 else None)
        speculates._decode(Pass(batch, order, "queue", proposal, traced), None)
    assert speculation.active() is active
    return costs, launched[0]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_pass_with_overlap_is_launched_without_a_synchronisation(
    active: Speculator, moves: list[Any], drafts: bool, traced: bool
) -> None:
    reqs = [Req({"temperature": 0}), Req({"temperature": 1.0, "top_k": 20})]
    if traced:
        reqs[0].sampling_params.custom_params = {"qspec_return_trace": True}
        tracing.begin(reqs[0])
    trees = trees_of(2) if drafts else trees_of(2).best(1)
    costs, launched = launch(active, reqs, trees)
    assert (launched.traced is not None) == traced
    if launched.traced is not None:
        with costs:
            launched.traced.record(
                reqs, trees, [[], [1]], [3, 3], pipeline="queue", batch_requests=2, batch_rows=9
            )
    assert not costs.synchronisations
    # The outcome of a verify pass, or the tokens of a plain pass.
    assert costs.downloads == [4 * (2 * WIDTH + 2 + 2 * WIDTH) if drafts else 8 * 2]
    assert len(costs.uploads) == (2 if drafts else 1)  # the trees, and the seeds of the draws
    result: Any = launched.result
    relay = result.next_draft_input
    assert relay.draft_token_num == WIDTH
    assert relay.accept_tokens.shape == (2 * WIDTH,)
    assert relay.accept_tokens.dtype == torch.int32
    assert {relay.accept_tokens.device, result.new_seq_lens.device} == {CUDA}
    assert not moves  # a chain's accepted path is in place


def test_a_prefill_with_drafts_is_launched_without_a_synchronisation() -> None:
    trees, lens = trees_of(3), [5, 3, 9]
    with fake_cuda() as costs:
        ids = torch.zeros(sum(lens), dtype=torch.int64, device=CUDA)
        batch: Any = SimpleNamespace(
            device=CUDA,
            extend_lens=lens,
            extend_num_tokens=sum(lens),
            input_ids=ids,
            out_cache_loc=ids,
            seq_lens=torch.zeros(3, dtype=torch.int64, device=CUDA),
            seq_lens_cpu=torch.tensor(lens),
            req_pool_indices=torch.zeros(3, dtype=torch.int64, device=CUDA),
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.zeros(9, 99, dtype=torch.int32, device=CUDA)
            ),
        )
        longer = with_drafts(batch, _drafts_of(batch, Proposal(trees, trees)))
    assert not costs.synchronisations
    drafted = int((trees.sizes - 1).sum())
    assert longer.input_ids.shape == longer.out_cache_loc.shape == (sum(lens) + drafted,)
    assert longer.extend_lens == [5, 4, 11]
    assert {longer.input_ids.device, longer.seq_lens.device} == {CUDA}


def test_with_overlap_a_branching_tree_moves_its_kv_without_asking_for_the_path(
    active: Speculator, moves: list[Any]
) -> None:
    trees = trees_of(2)
    trees.parents[1, 2] = 0
    costs, _ = launch(active, [Req({"temperature": 0})] * 2, trees)
    assert len(moves) == 1
    assert not costs.synchronisations


def test_an_outcome_is_read_with_one_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []

    def event(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waits.append(device))

    monkeypatch.setattr(transfers, "_event", event)
    with fake_cuda() as costs:
        numbers = torch.zeros(6, dtype=torch.int32, device=CUDA)
        outcome = ComingOutcome(numbers, numbers[:2], numbers.view(2, 3), np.array([0, 3]))
        assert not waits
        with pytest.raises(RuntimeError, match=r"\.numpy\(\) is not supported"):
            outcome.read()
    assert waits == [CUDA]
    assert costs.downloads == [14 * 4]
    assert costs.pinned == 1
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
