import pytest
import torch

from sglang_qspec.verify.likeliest import likeliest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (3, 128), (4, 1000), (0, 300)])
def test_likeliest_is_the_argmax_with_the_lowest_of_equal_ids(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    # Few distinct values, so that most maxima are ties.
    logits = torch.randint(-9, 4, (rows, vocab)).to(dtype)
    lowest = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits.to(device)).tolist() == lowest


def test_rows_of_minus_infinity_give_a_token_id_of_the_vocabulary() -> None:
    assert likeliest(torch.full((2, 300), float("-inf"))).tolist() == [0, 0]
