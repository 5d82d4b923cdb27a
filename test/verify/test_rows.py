"""A function of some rows, on devices that pick rows out and on those that do not."""

import pytest
import torch
from torch import Tensor

from sglang_qspec.verify import rows as picking
from sglang_qspec.verify.rows import Rows, fill


@pytest.mark.parametrize("picks", [True, False])
@pytest.mark.parametrize("chosen", [[], [0, 2], [0, 1, 2]])
def test_only_the_rows_of_the_mask_change(
    chosen: list[int], picks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picking, "picks", lambda _mask: picks)
    values, other = torch.zeros(3, 2), torch.arange(1.0, 7.0).view(3, 2)
    mask = torch.tensor([row in chosen for row in range(3)])
    filled = fill(values, mask, lambda rows: other[rows])
    expected = torch.stack([other[row] if row in chosen else values[row] for row in range(3)])
    assert torch.equal(filled, expected)
    assert not values.any()


def test_a_cpu_computes_no_row_that_the_mask_excludes() -> None:
    seen: list[Rows] = []

    def note(rows: Rows) -> Tensor:
        seen.append(rows)
        return torch.ones(1)

    fill(torch.zeros(3), torch.tensor([False, True, False]), note)
    fill(torch.zeros(3), torch.zeros(3, dtype=torch.bool), note)
    assert [rows.tolist() for rows in seen if isinstance(rows, Tensor)] == [[1]]
    assert len(seen) == 1
