"""The expected time of a batch, from the speed that is known."""

from __future__ import annotations

from sglang_qspec.tools.serve_batches.feed import Feed


def test_the_speed_of_the_batch_counts_until_that_of_the_servers_is_known() -> None:
    assert Feed().seconds(100.0, 0.0) is None
    assert Feed().seconds(100.0, 0.0, usual=20.0) == 5.0
    assert Feed(expected=50.0).seconds(100.0, 0.0, usual=20.0) == 2.0
