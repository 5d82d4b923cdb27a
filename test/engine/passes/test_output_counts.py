"""Counts of output tokens, updated with the tokens that are new."""

from __future__ import annotations

import gc
from collections import Counter

import torch

from sglang_qspec.engine.passes.sample.output_counts import OutputCounts


class Req:
    """The part of SGLang's request that is counted."""

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = output_ids


def counted(counts: OutputCounts, reqs: list[Req]) -> tuple[list[dict[int, int]], int]:
    """The counts of each request, and how many entries were sent."""
    changes = counts.read(reqs)
    slots, entries = torch.from_numpy(changes.slots), torch.from_numpy(changes.entries)
    used = torch.from_numpy(changes.used)
    ids, numbers = counts.write(slots, entries, used, int(changes.used.max()))
    rows = zip(ids.tolist(), numbers.tolist(), strict=True)
    found = [dict(zip(tokens, map(int, times), strict=True)) for tokens, times in rows]
    return found, changes.entries.shape[1]


def test_counts_follow_the_outputs_and_send_only_what_is_new() -> None:
    counts = OutputCounts(torch.device("cpu"))
    reqs = [Req([5, 5, 2]), Req([7]), Req([])]
    found, sent = counted(counts, reqs)
    assert found == [{5: 2, 2: 1}, {7: 1}, {0: 0}]
    assert sent == 4
    reqs[0].output_ids += [2, 9, 2]
    reqs[2].output_ids += [0]
    found, sent = counted(counts, reqs)
    assert found == [{5: 2, 2: 3, 9: 1}, {7: 1}, {0: 1}]
    assert sent == 3
    assert counted(counts, reqs)[1] == 0


def test_each_request_keeps_its_counts_in_a_batch_of_others() -> None:
    counts = OutputCounts(torch.device("cpu"))
    reqs = [Req(list(range(n, 2 * n))) for n in (1, 90, 300)]
    for batch in ([reqs[0]], [reqs[2], reqs[0]], [reqs[1]], reqs):
        found, _ = counted(counts, batch)
        assert found == [dict(Counter(req.output_ids)) for req in batch]


def test_an_output_that_became_shorter_is_counted_anew() -> None:
    counts, req = OutputCounts(torch.device("cpu")), Req([3, 3, 4])
    counted(counts, [req])
    req.output_ids = [4]
    assert counted(counts, [req])[0] == [{4: 1}]


def test_the_slot_of_a_request_that_is_gone_holds_nothing_of_it() -> None:
    counts = OutputCounts(torch.device("cpu"))
    counted(counts, [Req([3, 3, 4])])
    gc.collect()
    later = Req([])
    assert counted(counts, [later])[0] == [{0: 0}]
    assert counts._slots == 1
