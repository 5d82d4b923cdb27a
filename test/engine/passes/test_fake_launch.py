"""The launch of a pass on CUDA costs no wait: its transfers, and the wait that reads its outcome.

The tensors are fake (`fake_batches`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_qspec import transfers
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.passes import tracing, worker
from sglang_qspec.engine.passes.launch.prefill import _drafts_of, with_drafts
from sglang_qspec.engine.passes.launch.relay import relayed
from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput
from sglang_qspec.engine.passes.launcher import Launcher
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.outcome import ComingOutcome
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.engine.ranks import PassOrder, RankGroup
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PipelinePlan
from sglang_qspec.trie import DraftTrees
from test.engine.passes.fake_batches import VOCAB, WIDTH, Req, info_of, trees_of, without_kernels
from test.engine.speculating import enqueue, make
from test.verify.fake_cuda import CUDA, Costs, fake_cuda


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with without_kernels(monkeypatch):
        yield


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
    speculates._launcher = Launcher(target, graphs, leader, overlap=True)
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
            spec_info=relayed(lens, ones, lens),
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
    # The outcome of a verify pass; SGLang copies the tokens of a plain one.
    assert costs.downloads == ([4 * (2 * WIDTH + 2 + 2 * WIDTH)] if drafts else [])
    assert len(costs.uploads) == (2 if drafts else 1)  # the trees, and the seeds of the draws
    result: Any = launched.result
    relay = result.next_draft_input
    assert relay.accept_tokens.shape == (2,)
    assert relay.accept_tokens.dtype == torch.int64
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
