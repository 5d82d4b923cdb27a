"""The worker decides a pass before SGLang waits for the lengths of the last one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload

from sglang_qspec.engine.passes.launch.future_map import LastTokens
from sglang_qspec.engine.passes.launch.relay import relayed
from sglang_qspec.engine.passes.lineup import KnownLens
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import early, kv_ahead


def test_without_overlap_no_pass_is_early_and_the_reserve_of_slots_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = list[bool]()
    monkeypatch.setattr(kv_ahead, "note_pass", lambda *, one_slot: noted.append(one_slot))
    algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
    future_map = LastTokens(torch.device("cpu"), algorithm, pool)
    worker = QSpecWorker.__new__(QSpecWorker)
    monkeypatch.setattr(worker, "launches_early", lambda _: None, raising=False)
    for overlap in (False, True):
        early.decide(
            SimpleNamespace(enable_overlap=overlap, future_map=future_map, model_worker=worker),
            SimpleNamespace(),
        )
        assert noted == [False] * overlap


@pytest.mark.parametrize("in_place", [True, False])
def test_known_lengths_are_taken_once_and_without_a_copy_from_the_device(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """A pass over the same requests as the last one even reads the last one's own tensors."""
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
    algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
    future_map = LastTokens(torch.device("cpu"), algorithm, pool)
    slots, lens, ids = torch.tensor([3, 1]), torch.tensor([40, 50]), torch.tensor([7, 8])
    relay = relayed(ids, torch.ones(2, dtype=torch.int32), lens)
    future_map.publish(slots, lens)
    future_map.stash(slots, RelayPayload.from_ngram(relay))
    relay.future_indices = slots
    batch: Any = SimpleNamespace(spec_info=relay)
    worker = QSpecWorker.__new__(QSpecWorker)
    known = KnownLens(lens, 90, in_place)
    monkeypatch.setattr(worker, "launches_early", lambda _: known, raising=False)
    scheduler = SimpleNamespace(enable_overlap=True, future_map=future_map, model_worker=worker)
    early.decide(scheduler, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FutureMap, "resolve_seq_lens_cpu", None)
        future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [40, 50]
    assert relay.accept_tokens.tolist() == [7, 8]
    assert (batch.seq_lens is lens) == (relay.accept_tokens is ids) == in_place
    assert batch.seq_lens_sum == 90
    future_map.publish(slots, torch.tensor([41, 51]))
    future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens_cpu.tolist() == [41, 51]
    assert relay.accept_tokens is not ids


def test_passes_in_place_write_sglangs_buffers_before_another_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other pass may be over other requests, or have drafts."""
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
    algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
    future_map, slots = LastTokens(torch.device("cpu"), algorithm, pool), torch.tensor([3, 1])
    lens, ones = KnownLens(torch.tensor([40, 50]), 90, in_place=False), torch.ones(2).int()
    batch: Any = SimpleNamespace(spec_info=SimpleNamespace(future_indices=slots))
    for number in range(4):
        future_map.known = lens
        future_map.resolve_seq_lens_cpu(batch)
        batch.spec_info = relayed(torch.tensor([number, 9]), ones, lens.after.seq_lens)
        batch.spec_info.future_indices = slots
        future_map.publish(slots, lens.after.seq_lens)
        future_map.stash(slots, RelayPayload.from_ngram(batch.spec_info))
        lens = lens.after
    assert future_map.new_seq_lens_buf[3] == 41
    assert future_map.output_tokens_buf[3] == 0
    future_map.resolve_seq_lens_cpu(batch)
    future_map._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [44, 54]
    assert batch.spec_info.accept_tokens.tolist() == [3, 9]
    future_map.publish(slots, torch.tensor([48, 58]))
    future_map.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens.tolist() == [48, 58]
