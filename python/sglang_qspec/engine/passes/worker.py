"""The speculative worker: runs the passes of one rank for SGLang's scheduler.

The scheduler calls `forward_batch_generation` once per iteration, with a batch to prefill or to
decode. A decode batch takes one target pass, or one pass for each half. A `Pass` goes through three
steps:

- `Leader` decides it on rank 0, and the other ranks get its order: which trees it verifies, if any.
- `Launcher` runs the target over it, samples, and accepts draft tokens.
- `Settlement` reads its outcome on the host, at once or with the overlap scheduler one pass later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import (
    attention_backends,
    get_device,
    get_exec,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sglang_qspec import config
from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary import failsafe, installed
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.cuda.warm_up import compile_kernels
from sglang_qspec.engine.passes import prefill_tokens
from sglang_qspec.engine.passes.launch import batch_split, tree_attention
from sglang_qspec.engine.passes.launch.verify_input import (
    TreeVerifyInput,
    total_len_of,
    verify_input_of,
)
from sglang_qspec.engine.passes.launcher import Launcher
from sglang_qspec.engine.passes.leader import Leader, speculator_of
from sglang_qspec.engine.passes.lineup import KnownLens, Lineup
from sglang_qspec.engine.passes.outputs import check_lengths
from sglang_qspec.engine.passes.sample import grammar, greedy
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.settlement import Settlement
from sglang_qspec.engine.passes.states import TargetStates
from sglang_qspec.engine.passes.target_pass import EarlyPass, Pass
from sglang_qspec.engine.ranks import PassOrder, RankGroup
from sglang_qspec.policy.runtime_settings import RuntimeSettings

Publish = Callable[[torch.Tensor], None]
"""Takes the new lengths of a batch."""


class QSpecWorker(BaseSpecWorker):
    """Runs the passes of one rank; SGLang owns the target model and its memory."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        installed.check("scheduler")
        self._target_worker = target_worker
        self._device = str(get_device().device)
        widest: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = widest
        settings = config.from_environment()
        self.endpoints = settings.endpoints
        """Addresses of the sidecars that others run; equal on all ranks."""
        backend = attention_backends()[1]
        verification = tree_attention.verification_of(settings, self._device, backend)
        self._ranks = RankGroup(get_parallel().tp_group)
        self._runtime = RuntimeSettings.of(settings, widest, ragged=verification.ragged)
        self._graphs = PassGraphs(target_worker.model_runner, settings)
        self._overlap = not get_schedule().disable_overlap_schedule
        self._leader: Leader | None = None
        """Decides the passes; None on ranks after rank 0."""
        if self._ranks.rank == 0:
            vocab_size = target_worker.model_config.vocab_size
            self._leader = Leader(
                speculator_of(settings, self._runtime, gpu_id, vocab_size),
                self._runtime,
                self._graphs,
                self._device,
                chains=verification.chains,
                overlap=self._overlap,
            )
        states = None
        if self._leader is not None:
            model = target_worker.model_runner.model
            draft_model = get_spec().speculative_draft_model_path
            states = TargetStates.of(model, draft_model, settings.head_path)
        self._launcher = Launcher(
            target_worker, self._graphs, self._leader, overlap=self._overlap, states=states
        )
        accounting = None if self._leader is None else self._leader.accounting
        self._settlement = Settlement(accounting, overlap=self._overlap)
        self._early: Pass | None = None
        """The next pass, if `launches_early` has decided it."""
        self._lineup = Lineup([])
        """The requests of the last batch that `launches_early` got."""
        sampling_seeds.install()
        greedy.install()
        grammar.install(get_exec().kernel.grammar_backend)

    # The methods that SGLang calls on its NGRAM worker.

    @property
    def draft_worker(self) -> None:
        """None, because the draft model runs in the sidecar."""
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """Does nothing: the target's memory is all that there is."""

    def init_cuda_graphs(self) -> None:
        """Capture the graphs of further widths, and compile the kernels of passes with drafts.

        SGLang has already captured its own graphs.
        """
        self._graphs.capture()
        compile_kernels(self._target_worker.model_runner, self._device)

    def clear_cache_pool(self) -> None:
        """Drop all drafts. SGLang calls this for /flush_cache and after weight updates."""
        if self._leader is not None:
            self._leader.drop_drafts()

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a prefill or one round of decoding.

        The scheduler restores the fields of `batch` afterwards (forward isolation). The overlap
        scheduler passes `on_publish`. The worker calls `on_publish` with the new lengths int64 [bs]
        once the pass is launched, before the device has computed the lengths.
        """
        early, self._early = self._early, None
        if self._overlap and early is None:
            stream = torch.get_device_module(self._device).current_stream()
            record_stream_for_v2_verify(batch, None, stream)
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, on_publish)
        if early is None:
            self._settlement.settle()
            prefill_tokens.recover(batch.reqs)
        passes = []
        for decided in self._decided(batch) if early is None else (early,):
            self._decode(decided, on_publish)
            passes.append(decided)
        if len(passes) == 1:
            return passes[0].result
        return batch_split.join(
            [each.order.rows or () for each in passes], [each.result for each in passes]
        )

    def launches_early(self, batch: ScheduleBatch) -> KnownLens | None:
        """Decide whether the next pass is launched before the host knows the last one's tokens.

        A pass without drafts is, after passes without drafts, so that the device does not wait for
        the host between them. Returns the lengths of the texts; None if the pass is not launched
        early. Rank 0 decides, and all ranks ask for its choice in the same rounds. Several ranks
        launch no pass early once speculation has ended.
        """
        self._early = None
        if not self._overlap or not batch.forward_mode.is_decode() or batch.spec_info is None:
            return None
        if batch.spec_info.future_indices is None:
            return None
        lineup = self._lineup = self._lineup.of(batch.reqs)
        known = self._settlement.coming_lens(lineup)
        if known is None or (self._ranks.size > 1 and not self._ranks.speculates):
            return None
        early = EarlyPass(lineup, known)
        if self._leader is None:
            self._early = Pass(batch, pipeline="queue", early=early)
        else:
            with guarded("deciding a pass early"):
                self._early = self._leader.early(batch, early)
            if self._ranks.size > 1 and speculation.failed():
                self._early = None  # the other ranks learn of the failure by an order
        if self._ranks.choose(chosen=self._early is not None):
            return known
        self._early = None
        return None

    @property
    def has_early_pass(self) -> bool:
        """Whether the next pass is an early one, which `launches_early` has decided."""
        return self._early is not None

    @property
    def speculates(self) -> bool:
        """Whether speculation goes on; equal on all ranks between two rounds."""
        return self._ranks.speculates if self._ranks.size > 1 else not speculation.failed()

    def change_endpoints(self, endpoints: tuple[str, ...]) -> None:
        """Use the sidecars at these addresses, and no others, from now on."""
        self.endpoints = endpoints
        if self._leader is not None:
            self._leader.change_endpoints(endpoints)

    def is_early(self, result: GenerationBatchResult) -> bool:
        """Whether `result` is of a pass that was launched early and is not settled."""
        return self._settlement.is_early(result)

    def settle(self, result: GenerationBatchResult) -> None:
        """Settle the pass with this result, which the scheduler is about to process."""
        self._settlement.settle_through(result)

    # A round of decoding: decide, launch, settle.

    def _decided(self, batch: ScheduleBatch) -> Iterator[Pass]:
        """The passes of a decode round, the same ones on all ranks."""
        ordered = self._ranks.begin_round()
        if self._leader is not None:
            for decided in self._leader.passes(batch):
                self._ranks.send(decided.order)
                yield decided
            return
        order = PassOrder(last=False)
        while not order.last:
            order = self._ranks.receive() if ordered else PassOrder()
            part = batch if order.rows is None else batch_split.take(batch, order.rows)
            yield Pass(part, order, "queue")

    def _decode(self, decided: Pass, on_publish: Publish | None) -> None:
        """Launch a decode pass. Without overlap, also settle it."""
        if (self._overlap or self._ranks.size > 1) and decided.early is None:
            with guarded("comparing the lengths of outputs"):
                check_lengths(decided.reqs, decided.output_lens, decided.batch.seq_lens_cpu)
        verify_input = self._verify_input(decided)
        if verify_input is None:
            self._launcher.plain(decided)
        else:
            self._launcher.verify(decided, verify_input)
        if on_publish is not None:
            on_publish(decided.result.new_seq_lens)
        self._settlement.add(decided)
        if not self._overlap:
            self._settlement.settle()

    def _verify_input(self, decided: Pass) -> TreeVerifyInput | None:
        """Build the input of a pass with drafts; None for a plain pass.

        If speculation failed on one rank, all ranks run a plain pass.
        """
        if decided.trees is None:
            return None
        built = None
        batch = decided.batch
        with guarded("preparing a pass with drafts"):
            built = verify_input_of(
                decided.trees,
                batch.seq_lens,
                batch.device,
                full_mask=tree_attention.reads_full_mask(self._device),
                total_len=total_len_of(batch),
            )
        dissenter = self._ranks.dissenter(agrees=not speculation.failed())
        if dissenter is None:
            return built
        failsafe.follow(dissenter)
        return None

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish | None) -> GenerationBatchResult:
        """Run a prefill, which may verify drafts, or an idle batch."""
        prefill_tokens.forget(batch.reqs)
        drafts = None if self._leader is None else self._leader.prepare_prefill(batch)
        launched = Pass(batch)
        if drafts is None or not self._launcher.verify_prefill(launched, drafts):
            self._launcher.plain_prefill(launched)
        if on_publish is not None:
            on_publish(launched.result.new_seq_lens)
        if self._overlap or launched.proposal is not None or launched.states is not None:
            self._settlement.add(launched)
        if not self._overlap:
            self._settlement.settle()
        return launched.result
