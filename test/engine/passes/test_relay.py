"""Passes of different widths relay the last token of each text through SGLang's own buffers."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_qspec.engine.passes.launch.future_map import LastTokens
from sglang_qspec.engine.passes.launch.relay import relayed


class Pool:
    """SGLang's buffers for requests in slots 0 to 5."""

    def __init__(self) -> None:
        pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
        algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
        self._map = LastTokens(torch.device("cpu"), algorithm, pool)

    def stash(
        self,
        slots: list[int],
        token_ids: list[int],
        lens: list[int],
        dtype: torch.dtype = torch.int32,
    ) -> None:
        """A pass of the requests in these slots, with the same number of columns for each."""
        accept_lens = torch.tensor(lens, dtype=torch.int32)
        relay = relayed(torch.tensor(token_ids, dtype=dtype), accept_lens, torch.ones(len(lens)))
        self._map.stash(torch.tensor(slots), RelayPayload.from_ngram(relay))

    def last_ids(self, slots: list[int]) -> list[int]:
        """The input tokens of the next pass over the requests in `slots`."""
        carried = NgramVerifyInput(
            draft_token_num=1,
            future_indices=torch.tensor(slots),
            new_seq_lens=torch.ones(len(slots)),
        )
        batch: Any = SimpleNamespace(spec_info=carried)
        self._map._resolve_spec_extras(batch)
        assert carried.accept_tokens is not None
        assert carried.accept_tokens.dtype == torch.int64
        ids: list[int] = carried.accept_tokens.tolist()
        return ids


def test_passes_of_all_widths_share_one_buffer() -> None:
    pool = Pool()
    pool.stash([1, 3], [10, 20], [1, 1], torch.int64)  # a prefill
    pool.stash([3, 5], [30, 31, 0, 50, 51, 52], [2, 3])
    pool.stash([2], [60, 61, 62, 63], [4])
    assert pool.last_ids([5, 1, 3, 2]) == [52, 10, 31, 63]


def test_a_batch_without_requests_relays_nothing() -> None:
    lens = torch.zeros(0, dtype=torch.int32)
    relay = relayed(torch.zeros(0, dtype=torch.int64), lens, torch.zeros(0))
    assert relay.accept_tokens.shape == (0,)


def test_without_overlap_sglang_filters_the_relay_by_request() -> None:
    relay = relayed(torch.tensor([5, 6, 0, 7, 8, 9]), torch.tensor([2, 3]), torch.tensor([40, 50]))
    relay.filter_batch(torch.tensor([1]))
    assert relay.accept_tokens.tolist() == [9]
    assert relay.new_seq_lens.tolist() == [50]
