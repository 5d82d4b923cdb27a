"""Rows of KV slots: what they share, what they refuse, and what a pass costs the host on a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.kv_rows import KVRows
from test.verify.fake_cuda import CUDA, fake_cuda


def rows_of(slots: int, *, device: torch.device | str = "cpu") -> KVRows:
    return KVRows(torch.zeros(5, 20, dtype=torch.int32, device=device), 12, np.arange(1, slots + 1))


def test_appended_slots_are_in_the_table_row_by_row() -> None:
    rows = rows_of(30)
    first, second = rows.open(), rows.open()
    rows.append([first], [3])
    added = rows.append([second, first], [2, 4])
    assert added.rows.tolist() == [second] * 2 + [first] * 4
    assert added.positions.tolist() == [0, 1, 3, 4, 5, 6]
    assert rows.table[first, 3:7].tolist() == added.slots[2:].tolist()
    assert rows.slots(second).tolist() == added.slots[:2].tolist()
    rows.check_integrity()


def test_a_slot_is_free_when_the_last_row_that_holds_it_lets_it_go() -> None:
    rows = rows_of(10)
    parent = rows.open()
    rows.append([parent], [6])
    child = rows.fork(parent, 4)
    rows.append([child], [1])
    rows.truncate(parent, 2)  # positions 2 and 3 are the child's too
    assert rows.free_slots == 10 - 4 - 1
    rows.close(child)
    assert rows.free_slots == 8
    rows.close(parent)
    assert rows.free_slots == 10
    rows.check_integrity()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    rows = rows_of(15)
    first, second = rows.open(), rows.open()
    rows.append([first, second], [11, 1])
    with pytest.raises(DraftModelError, match=f"add 2 tokens to row {first}: it holds 11 of .* 12"):
        rows.append([second, first], [1, 2])
    with pytest.raises(DraftModelError, match="needs 4 KV slots, but only 3 are free"):
        rows.append([second], [4])
    assert (rows.length(first), rows.length(second), rows.free_slots) == (11, 1, 3)
    rows.check_integrity()


@pytest.mark.parametrize("tokens", [[[7], [8], [9]], [[7, 7, 7], [8], [9, 9]]])
def test_a_pass_uploads_once_and_forks_and_truncations_not_at_all(tokens: list[list[int]]) -> None:
    model: Any = object.__new__(DraftModel)
    passes: list[dict[str, Any]] = []
    model._forward = lambda **fields: passes.append(fields)
    model._device = CUDA
    with fake_cuda() as costs:
        model.rows = rows = rows_of(40, device=CUDA)
        own = [rows.open() for _ in tokens]
        # Not in inference mode, in which the operators of copies have other names.
        for run, given in ((DraftModel.extend, tokens), (DraftModel.step, [1] * len(own))):
            inspect.unwrap(run)(model, own, given)
        assert len(costs.uploads) == 2
        assert costs.kernels.count("index_put_") == 2  # the device's table
        costs.kernels.clear()
        child = rows.fork(own[0], 1)
        rows.truncate(own[0], 1)
        rows.close(child)
        assert costs.kernels == ["copy_"]  # the fork's
        assert len(costs.uploads) == 2
    assert not costs.synchronisations
    for fields in passes:
        tensors = [each for each in fields.values() if isinstance(each, torch.Tensor)]
        assert sum(not each.is_cuda for each in tensors) == 2
