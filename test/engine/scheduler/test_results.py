"""Passes are settled before SGLang processes their results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_qspec.engine import speculation
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import kv_ahead, results
from sglang_qspec.engine.speculator import Speculator


def request(**state: Any) -> Any:
    kept = {
        "finished_reason": None,
        "is_retracted": False,
        "reasoning_tokens": 0,
        "sampling_params": SimpleNamespace(stop_regex_strs=[]),
        "kv": SimpleNamespace(kv_committed_len=7),
        "spec_verify_ct": 3,
        "spec_correct_drafts_histogram": [2, 1],
    }
    return SimpleNamespace(**{**kept, **state})


class Scheduler:
    """A scheduler whose worker settles results in name only."""

    def __init__(self, *, early: bool = False, overlap: bool = True) -> None:
        self.settled: list[object] = []
        worker: Any = object.__new__(QSpecWorker)
        worker.settle = self.settled.append
        worker.is_early = lambda _: early
        self.model_worker: object = worker
        self.enable_overlap = overlap
        self.counted: list[tuple[int, int, int]] = []
        self.metrics_reporter = SimpleNamespace(
            update_spec_metrics=lambda requests, drafts, num_accept_tokens: self.counted.append(
                (requests, drafts, num_accept_tokens)
            )
        )

    def process(self, *reqs: Any, width: int = 1, **state: Any) -> Any:
        """Settle a pass of this width over `reqs`; returns SGLang's batch."""
        kept = {
            "forward_mode": ForwardMode.DECODE,
            "has_grammar": False,
            "return_logprob": False,
            "spec_algorithm": "QSPEC",
        }
        batch = SimpleNamespace(reqs=list(reqs), **{**kept, **state})
        result = SimpleNamespace(speculative_num_draft_tokens=width)
        results.settle(self, batch, result)
        assert self.settled[-1] is result
        return batch


def test_the_worker_settles_the_pass_of_a_result_also_after_speculation_has_ended(
    active: Speculator,
) -> None:
    scheduler = Scheduler()
    speculation.activate(active)
    scheduler.process()
    speculation.deactivate()
    scheduler.process()
    assert len(scheduler.settled) == 2


def test_a_worker_of_another_algorithm_is_not_asked() -> None:
    results.settle(SimpleNamespace(model_worker=object()), None, None)


def test_sglang_adds_the_tokens_of_a_plain_pass_as_without_speculation() -> None:
    """They are counted as SGLang counts the tokens of a pass whose drafts are all wrong."""
    scheduler = Scheduler()
    reqs = [request(), request(spec_correct_drafts_histogram=[])]
    dropping = [request(finished_reason="stop"), request(is_retracted=True)]
    batch = scheduler.process(*reqs, *dropping)
    assert batch.spec_algorithm is SpeculativeAlgorithm.NONE
    assert [req.kv.kv_committed_len for req in batch.reqs] == [8, 8, 7, 7]
    assert [req.spec_verify_ct for req in batch.reqs] == [4, 4, 3, 3]
    histograms = [req.spec_correct_drafts_histogram for req in batch.reqs]
    assert histograms == [[3, 1], [1], [2, 1], [2, 1]]
    assert scheduler.counted == [(4, 0, 4)]


@pytest.mark.parametrize(
    ("overlap", "width", "state"),
    [
        (True, 4, {}),
        (True, 1, {"has_grammar": True}),
        (True, 1, {"return_logprob": True}),
        (True, 1, {"forward_mode": ForwardMode.EXTEND}),
        (False, 1, {}),  # the batch is no copy
    ],
)
def test_sglang_counts_the_tokens_of_other_passes(
    overlap: bool, width: int, state: dict[str, Any]
) -> None:
    scheduler = Scheduler(overlap=overlap)
    batch = scheduler.process(request(), width=width, **state)
    assert batch.spec_algorithm == "QSPEC"
    assert batch.reqs[0].kv.kv_committed_len == 7
    assert not scheduler.counted


def test_without_overlap_the_kv_slots_that_a_pass_takes_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass with drafts, and a prefill, may take more than one slot of a request."""
    noted: list[bool] = []
    monkeypatch.setattr(kv_ahead, "note_pass", lambda *, one_slot: noted.append(one_slot))
    scheduler = Scheduler(overlap=False)
    scheduler.process(request())
    scheduler.process(request(), width=4)
    scheduler.process(request(), forward_mode=ForwardMode.EXTEND)
    assert noted == [True, False, False]
    Scheduler(overlap=True).process(request())
    assert len(noted) == 3


def test_our_search_for_the_end_replaces_sglangs_where_it_finds_another_one() -> None:
    kinds = {
        "ordinary": request(),
        "reasoning": request(reasoning_tokens=1),
        "regex": request(sampling_params=SimpleNamespace(stop_regex_strs=["a"])),
        "unsearched": request(qspec_record=SimpleNamespace(prefill=None, unsearched=2)),
        "prefilled": request(qspec_record=SimpleNamespace(prefill=object(), unsearched=0)),
        "ended": request(finished_reason="stop", reasoning_tokens=1),
    }

    def watched(width: int, *, early: bool, **state: Any) -> set[str]:
        Scheduler(early=early).process(*kinds.values(), width=width, **state)
        names = {name for name, req in kinds.items() if hasattr(req, "update_finish_state")}
        for name in names:
            del kinds[name].update_finish_state
        return names

    every_pass = {"reasoning", "regex"}
    assert watched(1, early=True) == every_pass
    assert watched(1, early=False) == {*every_pass, "unsearched", "prefilled"}
    assert watched(4, early=False) == {*kinds} - {"ended"}
    assert watched(1, early=False, forward_mode=ForwardMode.EXTEND) == {*kinds} - {"ended"}
