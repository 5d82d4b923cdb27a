"""A worker whose passes run in name only, in SGLang's order of events."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.decide import standing
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.outcome import ComingTokens, PlainOutcome
from sglang_qspec.engine.passes.settlement import Settlement
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.ranks import RankGroup
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from test.engine.simulation import Clock

PROMPT = [5, 6, 7]


class Req:
    """The part of SGLang's request that early passes read."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.origin_input_ids = PROMPT
        self.output_ids = [8]
        self.customized_info: dict[str, Any] | None = None
        self.multimodal_inputs: object | None = None
        self.grammar: object | None = None
        self.sampling_params = SimpleNamespace(top_k=1, custom_params=None)
        self.is_retracted = False
        self.inflight_middle_chunks = 0
        self.ended = False

    def finished(self) -> bool:
        return self.ended


class Tokens(ComingTokens):
    """The tokens of a pass; `events` records when the host waits for them."""

    def __init__(self, name: str, requests: int, events: list[str]) -> None:
        self._name, self._events = name, events
        self._tokens = [9] * requests

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")

    def read(self) -> PlainOutcome:
        self.wait()
        return PlainOutcome(self._tokens)


class Launcher:
    """Launches passes in name only."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._count = 0

    def plain(self, decided: Pass) -> None:
        self._count += 1
        self._events.append(f"launch {self._count}")
        decided.result = SimpleNamespace(new_seq_lens=None)
        decided.outcome = Tokens(str(self._count), len(decided.reqs), self._events)


class Engine:
    """A worker with SGLang's order of events: a result is processed behind the next launch."""

    def __init__(self, active: Speculator, clock: Clock, *, overlap: bool = True) -> None:
        self.active, self.clock = active, clock
        self.events: list[str] = []
        self.runtime = RuntimeSettings.of(QSpecConfig(), 8)
        self.leader = Leader(
            active,
            self.runtime,
            SimpleNamespace(tiers=(), widths=lambda _: None),
            "cpu",
            chains=False,
            overlap=overlap,
        )
        self.leader.accounting = PassAccounting(active, self.runtime, clock)
        self.worker = QSpecWorker.__new__(QSpecWorker)
        self.worker._overlap = overlap
        self.worker._device = "cpu"
        self.worker._early = None
        self.worker._lineup = Lineup([])
        self.worker._ranks = RankGroup()
        self.worker._leader = self.leader
        launcher: Any = Launcher(self.events)
        self.worker._launcher = launcher
        self.worker._settlement = Settlement(self.leader.accounting, overlap=overlap)
        self.reqs = [Req(rid) for rid in "ab"]
        self.last: Any = None

    def batch(self, **info: Any) -> Any:
        flags = {"has_custom_logit_processor": False, "has_watermark_candidates": False}
        penalties = SimpleNamespace(is_required=False)
        lens = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in self.reqs]
        return SimpleNamespace(
            reqs=self.reqs,
            forward_mode=ForwardMode.DECODE,
            spec_info=SimpleNamespace(future_indices=torch.arange(len(self.reqs))),
            has_grammar=info.pop("has_grammar", False),
            seq_lens_cpu=torch.tensor(lens),
            sampling_info=SimpleNamespace(**{**flags, "penalizer_orchestrator": penalties, **info}),
        )

    def round(self, batch: Any = None) -> list[int] | None:
        """Launch a pass, then process the last one. Returns the lengths of an early pass."""
        batch = batch or self.batch()
        known = self.worker.launches_early(batch)
        if known is not None:
            batch.seq_lens_cpu = known.seq_lens
        elif self.last is not None:  # the device knows the tokens of the last pass
            batch.seq_lens_cpu += 1
        result = self.worker.forward_batch_generation(batch)
        self.clock.now += 0.5
        if self.last is not None:
            self.worker.settle(self.last)
            for req in self.reqs:
                req.output_ids.append(9)
        self.last = result
        return None if known is None else known.seq_lens.tolist()


def noted_decisions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches of all decisions to come, which hold however slow the machine is."""
    sizes, begin = list[int](), engine.leader._rounds.begin

    def counted(requests: int, **keywords: Any) -> PipelinePlan:
        sizes.append(requests)
        return begin(requests, **keywords)

    monkeypatch.setattr(engine.leader._rounds, "begin", counted)
    monkeypatch.setattr(standing, "SECONDS", math.inf)
    return sizes
