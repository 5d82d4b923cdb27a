"""Outputs with the tokens of the last pass, which SGLang adds one pass late."""

from array import array

import pytest
import torch

from sglang_qspec.engine.passes.outputs import (
    Spliced,
    check_lengths,
    last_ids_of,
    output_of,
)
from sglang_qspec.engine.passes.request_record import record_of


class Req:
    """The part of SGLang's request that the code reads."""

    origin_input_ids = (1, 2, 3)

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = array("q", output_ids)
        self.multimodal_inputs: object = None
        self.ended = False

    def finished(self) -> bool:
        return self.ended


def test_tokens_of_the_last_pass_follow_the_output_until_sglang_has_added_them() -> None:
    req, other = Req([4, 5]), Req([4, 5])
    record_of(req).unadded = 2, [6, 7]
    assert list(output_of(req)) == [4, 5, 6, 7]
    assert list(output_of(other)) == [4, 5]
    req.output_ids.extend([6, 7])
    assert list(output_of(req)) == [4, 5, 6, 7]


def test_a_spliced_output_has_the_items_of_both_sequences() -> None:
    spliced = Spliced([1, 2, 3], [4, 5])
    whole = [1, 2, 3, 4, 5]
    assert list(spliced) == whole
    for place in range(-5, 5):
        assert spliced[place] == whole[place]
    for start in (None, *range(-6, 7)):
        for stop in (None, *range(-6, 7)):
            assert spliced[start:stop] == whole[start:stop]
    with pytest.raises(IndexError):
        spliced[5]
    with pytest.raises(ValueError, match="the step is 2"):
        spliced[::2]


def test_the_last_token_is_the_newest_of_the_output_or_that_of_the_prompt() -> None:
    old, new, empty = Req([4]), Req([4]), Req([])
    record_of(new).unadded = 1, [5, 6]
    assert last_ids_of([old, new, empty]).tolist() == [4, 6, 3]


def test_an_output_of_another_length_than_on_the_device_is_an_error() -> None:
    req = Req([4, 5])
    lens = torch.tensor([3 + 2 - 1])
    check_lengths([req], [2], lens)
    check_lengths([req], [9], None)
    with pytest.raises(RuntimeError, match="1 output tokens on the host, but 2 on the device"):
        check_lengths([req], [1], lens)
    with_image, ended = Req([4]), Req([4])
    with_image.multimodal_inputs = object()
    ended.ended = True
    check_lengths([with_image, ended], [1, 1], torch.tensor([4, 4]))
